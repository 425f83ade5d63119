"""The native model that is nearest to an imported one, for estimates of time and memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from graphtrain.config.schema import Mixture, Model
from graphtrain.torch_models.source import read_config

if TYPE_CHECKING:
    from graphtrain.config.schema import Imported

# What transformers' families call the same thing.
_NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "embed": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "mlp": ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "moe_intermediate_size"),
    "experts": ("num_local_experts", "num_experts"),
}
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


def blocks_of(model: Imported) -> int | None:
    """Blocks of a model as its configuration has them; None for a module of the user's own."""
    if model.hf is None:
        return None
    return _first(read_config(model.hf, model.overrides), _NAMES["layers"])


def look_alike(model: Imported) -> Model | None:
    """A native model of about the same sizes; None where a module's factory hides them."""
    if model.hf is None:
        return None
    config = read_config(model.hf, model.overrides)
    sizes: dict[str, Any] = {name: _first(config, names) for name, names in _NAMES.items()}
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
        tied_head=bool(config.get("tie_word_embeddings")),
        mixture=Mixture(experts=experts, per_token=per_token) if experts else None,
        dtype=model.dtype,
        remat=model.remat,
    )


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    return next((config[name] for name in names if isinstance(config.get(name), int)), None)
