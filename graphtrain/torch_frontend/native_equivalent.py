"""Native models of about the size of an imported one, for estimates of time and memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from graphtrain.config.hf_config import SIZE_NAMES, first_int, read_config
from graphtrain.config.schema import (
    AttentionImplementation,
    EquivalentModel,
    LatentAttention,
    MixtureOfExperts,
    Model,
)
from graphtrain.torch_frontend.estimated_families import GATED, WITHOUT_GATE
from graphtrain.torch_frontend.tower_equivalent import language_model_config, tower_equivalent

if TYPE_CHECKING:
    from graphtrain.config.schema import TorchModel

# Families that do not call graphtrain's attention; docs/guides/torch.md, Attention.
_OWN_ATTENTION = ("bloom", "falcon", "gpt_neo")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")
# Settings with which only some layers have experts; a native model has them in a run of layers.
_EXPERTS_IN_SOME_LAYERS = ("decoder_sparse_step", "mlp_only_layers", "moe_layer_interval")
# Kinds of layers that compute no attention scores.
_WITHOUT_SCORES = {"linear_attention", "conv", "mamba", "mamba2", "recurrent", "mlp", "moe"}
# Families of which only some layers, which config.json may leave to the module, have scores.
_HYBRIDS = {
    "bailing_hybrid", "granitemoehybrid", "kimi_linear", "lfm2", "lfm3", "minimax", "qwen3_next",
    "qwen3_5_moe_text", "zaya",
}  # fmt: skip
_WITHOUT_ATTENTION = {"xlstm"}
# Kinds of layers with products besides those with weights and with scores.
_RECURRENT = {"linear_attention", "mamba", "mamba2", "recurrent", "hybrid", "hybrid_sliding"}
_MAY_BE_WRONG = (
    "time, and memory besides weights and moments, may be wrong by far, most of all with long "
    "sequences, and the compiled program (graphtrain plan without --no-compile) shows both"
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
    elif not _has_known_sizes(config):
        return _module_equivalent(model) if build else None
    try:
        return _configured_equivalent(model, config)
    except ValidationError:  # sizes of a family that a native model cannot have, or damaged ones
        return None


def estimation_caveat(model: TorchModel) -> str:
    """Return how the model differs from its native equivalent; empty if nothing is known to.

    Builds the module of a family whose sizes are guessed.

    Args:
        model: The imported model.
    """
    if model.images:
        return ""
    config = None if model.hf is None else read_config(model.hf, model.overrides)
    if config is not None and _has_known_sizes(config):
        kinds = _kinds_of_layers(config)
        if config["model_type"] in _HYBRIDS and not kinds:
            return (
                "attention scores are counted in all layers, because config.json does not say "
                f"which of them have none (layer_types); {_MAY_BE_WRONG}"
            )
        return _uncounted(kinds)
    from graphtrain.torch_frontend.language_model import TorchLanguageModel

    opened = TorchLanguageModel(model).opened()
    if _attention_of_module(opened.meta.module) is None:
        return (
            "the sizes of the module are guessed from its weights, and its attention is taken to "
            f"be in every layer, as wide as its widest projection; {_MAY_BE_WRONG}"
        )
    kinds = getattr(opened.meta.module.config, "layer_types", None) or ()
    guessed = "the width of its MLP is guessed from the weights"
    return "; ".join(filter(None, (guessed, _uncounted(kinds))))


def _uncounted(kinds: Sequence[str]) -> str:
    """Return what of layers of these kinds is not counted; empty if all is."""
    found = [kind for kind in kinds if kind in _RECURRENT]
    if not found:
        return ""
    names = " and ".join(dict.fromkeys(found))
    return (
        f"what {len(found)} of {len(kinds)} layers ({names}) compute besides projections is not "
        "counted: 5 to 11 % of the FLOPs of models of width 512, less of wider ones. On CPUs, XLA "
        "also computes the weight gradient of a depthwise convolution for all pairs of channels"
    )


def _kinds_of_layers(config: Mapping[str, Any]) -> Sequence[str]:
    """Return the kind of each layer; empty if the configuration does not say it."""
    for name in ("layer_types", "layers_block_type"):
        if isinstance(kinds := config.get(name), list | tuple):
            return kinds
    if interval := first_int(config, ("full_attention_interval",)):  # Qwen3-Next
        layers = first_int(config, SIZE_NAMES["layers"]) or interval
        kinds = "linear_attention", "full_attention"
        return [kinds[(layer + 1) % interval == 0] for layer in range(layers)]
    return ()


def _scored_layers(config: Mapping[str, Any]) -> float:
    """Return the fraction of layers that compute attention scores; 1.0 if nothing is said."""
    if config["model_type"] in _WITHOUT_ATTENTION:
        return 0.0
    kinds = _kinds_of_layers(config)
    return sum(kind not in _WITHOUT_SCORES for kind in kinds) / len(kinds) if kinds else 1.0


def _has_known_sizes(config: Mapping[str, Any]) -> bool:
    """Return whether a native model has the parameters that such a configuration describes."""
    irregular = any(config.get(name) not in (None, 0, 1, []) for name in _EXPERTS_IN_SOME_LAYERS)
    return config["model_type"] in GATED | WITHOUT_GATE and not irregular


def _configured_equivalent(model: TorchModel, config: Mapping[str, Any]) -> Model | None:
    sizes: dict[str, Any] = {name: first_int(config, names) for name, names in SIZE_NAMES.items()}
    if not (sizes["layers"] and sizes["embed"] and sizes["heads"]):
        return None
    mlp = sizes["mlp"] or 4 * sizes["embed"]
    moe = _mixture(config, sizes["experts"], dense_mlp=mlp)
    latent = _latent_attention(config)
    assert model.vocab is not None
    return EquivalentModel(
        scored_layers=_scored_layers(config),
        layers=sizes["layers"] - (moe.dense_layers if moe else 0),
        embed=sizes["embed"],
        heads=sizes["heads"],
        kv_heads=_kv_heads(config, sizes["kv_heads"]) if latent is None else None,
        head_dim=_head_dim(config, sizes["embed"] // sizes["heads"], latent),
        latent_attention=latent,
        mlp=_expert_width(config, mlp) if moe else mlp,
        vocab=model.vocab,
        activation="gelu" if config["model_type"] in WITHOUT_GATE else "swiglu",
        tie_word_embeddings=bool(config.get("tie_word_embeddings")),
        moe=moe,
        dtype=model.dtype,
        remat=model.remat,
        attention=_attention(model, config["model_type"]),
    )


def _mixture(
    config: Mapping[str, Any], experts: int | None, *, dense_mlp: int
) -> MixtureOfExperts | None:
    """Return the mixture of experts that a configuration describes; None if it has none.

    Dense layers are those before the mixture (DeepSeek, GLM); of other arrangements, every layer
    counts as one with experts.
    """
    if not experts:
        return None
    in_front = first_int(config, ("first_k_dense_replace",)) or 0
    return MixtureOfExperts(
        experts=experts,
        experts_per_token=first_int(config, _EXPERTS_PER_TOKEN) or 2,
        shared_expert_mlp=_shared_width(config, dense_mlp),
        dense_layers=in_front,
        dense_mlp=dense_mlp if in_front else None,
    )


def _expert_width(config: Mapping[str, Any], dense_mlp: int) -> int:
    """Return the hidden width of an expert; families without dense layers call it that of MLPs."""
    return first_int(config, ("moe_intermediate_size",)) or dense_mlp


def _shared_width(config: Mapping[str, Any], dense_mlp: int) -> int | None:
    """Return the hidden width of the experts that process every token; None if there are none."""
    width = first_int(config, ("shared_expert_intermediate_size",))
    count = first_int(config, ("n_shared_experts",)) or 0
    return width or count * _expert_width(config, dense_mlp) or None


def _latent_attention(config: Mapping[str, Any]) -> LatentAttention | None:
    """Return the sizes of multi-head latent attention; None if the model has another one."""
    rank, rotated, value = (
        first_int(config, (name,)) for name in ("kv_lora_rank", "qk_rope_head_dim", "v_head_dim")
    )
    if not (rank and rotated and value):
        return None
    return LatentAttention(
        kv_lora_rank=rank,
        q_lora_rank=first_int(config, ("q_lora_rank",)),
        qk_rope_head_dim=rotated,
        v_head_dim=value,
    )


def _head_dim(config: Mapping[str, Any], default: int, latent: LatentAttention | None) -> Any:
    """Return the width of a query head, which Model checks."""
    if latent is not None:
        return (first_int(config, ("qk_nope_head_dim",)) or 0) + latent.qk_rope_head_dim
    return config.get("head_dim") or default


def _kv_heads(config: Mapping[str, Any], stated: int | None) -> int | None:
    return 1 if config.get("multi_query") else stated


def _attention(model: TorchModel, kind: str) -> AttentionImplementation:
    """Return the attention implementation; "dense" if the module computes its own."""
    computes_own = kind in _OWN_ATTENTION or model.front_end == "strict"
    return "dense" if computes_own else model.attention


def _module_equivalent(model: TorchModel) -> Model | None:
    """Return a model with equally many matrix weights (the N of 6 N FLOPs) and as wide queries.

    None for a mixture of experts, whose tokens use only some of these weights.
    """
    from graphtrain.torch_frontend.blocks import list_lengths
    from graphtrain.torch_frontend.language_model import TorchLanguageModel

    opened = TorchLanguageModel(model).opened()
    if not opened.embed:
        return None
    assert model.vocab is not None
    layers = max(list_lengths(opened.block_lists).values(), default=1)
    specs = list(opened.specs().values())
    if any("experts" in spec.axes for spec in specs):
        return None
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
    heads, head_dim, scored = _attention_of_module(opened.meta.module) or (
        *_heads(max(widths, default=1)),
        1.0,
    )
    attention = 4 * opened.embed * heads * head_dim
    mlp = max(1, round((weight_count / layers - attention) / (2 * opened.embed)))
    return EquivalentModel(
        scored_layers=scored,
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


def _attention_of_module(module: Any) -> tuple[int, int, float] | None:
    """Return heads, head_dim and the fraction of layers with scores by a module's configuration.

    None if it has none, as a module of the user, or does not say the number of heads.
    """
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None) or ()
    scored = sum(kind not in _WITHOUT_SCORES for kind in kinds) / len(kinds) if kinds else 1.0
    if not scored:
        return 1, 2, scored
    heads, width = (getattr(config, name, None) for name in ("num_attention_heads", "hidden_size"))
    if not (isinstance(heads, int) and isinstance(width, int) and heads > 0):
        return None
    head_dim = getattr(config, "head_dim", None) or width // heads
    return None if head_dim % 2 else (heads, head_dim, scored)  # native models have even ones


def _heads(width: int) -> tuple[int, int]:
    """Guess the number of heads and head_dim, which only estimates of attention scores use."""
    for head_dim in (128, 64, 32, 16, 8, 4, 2):
        if width % head_dim == 0 and width // head_dim >= 4:
            return width // head_dim, head_dim
    return max(1, width // 2), 2
