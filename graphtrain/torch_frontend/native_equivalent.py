"""Native models of about the size of an imported one, for estimates of time and memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from graphtrain.config.hf_config import SIZE_NAMES, first_int, read_config
from graphtrain.config.schema import AttentionImplementation, MixtureOfExperts, Model
from graphtrain.torch_frontend.tower_equivalent import language_model_config, tower_equivalent

if TYPE_CHECKING:
    from graphtrain.config.schema import TorchModel

# Families that do not call graphtrain's attention; docs/guides/torch.md, Attention.
_OWN_ATTENTION = ("bloom", "falcon", "gpt_neo")
# Families whose MLP has no gate.
_WITHOUT_GATE = (
    "bloom",
    "falcon",
    "gpt2",
    "gpt_neo",
    "gpt_neox",
    "gptj",
    "opt",
    "phi",
    "starcoder2",
)


def native_equivalent(model: TorchModel, *, build: bool = True) -> Model | None:
    """Return a native model of about the same sizes; None if they are unknown.

    Of a model of text and images, it is the language model: see tower_equivalent.

    Args:
        model: The imported model.
        build: Whether a module may be built to find its sizes, which imports PyTorch.
    """
    if model.hf is None:
        return _module_equivalent(model) if build else None
    config = read_config(model.hf, model.overrides)
    if model.images:
        if tower_equivalent(model, build=build) is None:
            return None
        config = language_model_config(model, build=build)
    try:
        return _configured_equivalent(model, config)
    except ValidationError:  # sizes of a family that a native model cannot have, or damaged ones
        return None


def _configured_equivalent(model: TorchModel, config: Mapping[str, Any]) -> Model | None:
    sizes: dict[str, Any] = {name: first_int(config, names) for name, names in SIZE_NAMES.items()}
    if not (sizes["layers"] and sizes["embed"] and sizes["heads"]):
        return None
    experts = sizes.pop("experts")
    per_token = config.get("num_experts_per_tok", 2)
    assert model.vocab is not None
    return Model(
        layers=sizes["layers"],
        embed=sizes["embed"],
        heads=sizes["heads"],
        kv_heads=1 if config.get("multi_query") else sizes["kv_heads"],
        head_dim=config.get("head_dim") or sizes["embed"] // sizes["heads"],
        mlp=sizes["mlp"] or 4 * sizes["embed"],
        vocab=model.vocab,
        activation="gelu" if config["model_type"] in _WITHOUT_GATE else "swiglu",
        tie_word_embeddings=bool(config.get("tie_word_embeddings")),
        moe=MixtureOfExperts(experts=experts, experts_per_token=per_token) if experts else None,
        dtype=model.dtype,
        remat=model.remat,
        attention=_attention(model, config["model_type"]),
    )


def _attention(model: TorchModel, kind: str) -> AttentionImplementation:
    """Return the attention implementation; "dense" if the module computes its own."""
    computes_own = kind in _OWN_ATTENTION or model.front_end == "strict"
    return "dense" if computes_own else model.attention


def _module_equivalent(model: TorchModel) -> Model | None:
    """Return a model with equally many matrix weights (the N of 6 N FLOPs) and as wide queries."""
    from graphtrain.torch_frontend.blocks import list_lengths
    from graphtrain.torch_frontend.language_model import TorchLanguageModel

    opened = TorchLanguageModel(model).opened()
    if not opened.embed:
        return None
    assert model.vocab is not None
    layers = max(list_lengths(opened.block_lists).values(), default=1)
    specs = list(opened.specs().values())
    tables = [spec for spec in specs if {"vocab", "embed"} <= {*spec.axes}]
    matrices = [
        spec
        for spec in specs
        if not {"vocab", "positions"} & {*spec.axes} and len({*spec.axes} - {"layers"}) > 1
    ]
    weight_count = sum(math.prod(spec.shape) for spec in matrices)
    widths = [
        size
        for spec in matrices
        for size, axis in zip(spec.shape, spec.axes, strict=True)
        if axis == "heads"
    ]
    heads, head_dim = _heads(max(widths, default=1))
    attention = 4 * opened.embed * heads * head_dim
    mlp = max(1, round((weight_count / layers - attention) / (2 * opened.embed)))
    return Model(
        layers=layers,
        embed=opened.embed,
        heads=heads,
        head_dim=head_dim,
        mlp=mlp,
        vocab=model.vocab,
        activation="gelu",
        tie_word_embeddings=len(tables) == 1,
        dtype=model.dtype,
        remat=model.remat,
    )


def _heads(width: int) -> tuple[int, int]:
    """Guess the number of heads and head_dim, which only estimates of attention scores use."""
    for head_dim in (128, 64, 32, 16, 8, 4, 2):
        if width % head_dim == 0 and width // head_dim >= 4:
            return width // head_dim, head_dim
    return max(1, width // 2), 2
