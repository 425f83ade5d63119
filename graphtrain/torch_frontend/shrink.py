"""Small models of the same architecture, for the parity check of large ones."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from graphtrain.config.hf_config import read_config
from graphtrain.errors import ImportedModelError
from graphtrain.torch_frontend.meta_module import build_on_meta, parameter_count
from graphtrain.torch_frontend.model import factory

if TYPE_CHECKING:
    from graphtrain.config.schema import TorchModel

FULL_SIZE_LIMIT = 20_000_000  # weights up to which a model is compared at full size
_LIMIT = 200_000_000  # weights up to which a model is compared at all
_HEAD = 16  # head_dim


def shrink_model(model: TorchModel) -> tuple[TorchModel, dict[str, Any]]:
    """Return the model to compare, and the overrides that make it smaller.

    Raises:
        ImportedModelError: the model is still too large.
    """
    given = dict(model.parity)
    small = replace(model, overrides={**model.overrides, **given}, parity={})
    count = parameter_count(build_on_meta(factory(small)))
    if count <= FULL_SIZE_LIMIT:
        return small, given
    if model.hf is not None:
        given = _small_overrides(read_config(model.hf, model.overrides)) | given
        small = replace(model, overrides={**model.overrides, **given}, parity={})
        count = parameter_count(build_on_meta(factory(small)))
    if count > _LIMIT:
        raise ImportedModelError(
            f"the model has {count:,} parameters, too many to compare with PyTorch on this host; "
            "set [program.model.parity] to overrides that make it small, for example {layers = 2}"
        )
    return small, given


def _small_overrides(config: dict[str, Any]) -> dict[str, Any]:
    """Return overrides for few layers and narrow heads; ratios and layer types are unchanged."""
    from transformers import AutoConfig

    settings = {name: value for name, value in config.items() if name != "model_type"}
    made = AutoConfig.for_model(config["model_type"], **settings)
    heads, kv_heads = made.num_attention_heads, getattr(made, "num_key_value_heads", None)
    group = heads // kv_heads if kv_heads else 1
    few = 2 * group if group <= 8 else group
    layers = _few_layers(made)
    wanted: dict[str, Any] = {
        "num_hidden_layers": layers,
        "num_attention_heads": few,
        "hidden_size": few * _HEAD,
        "num_key_value_heads": few // group if kv_heads else None,
        "head_dim": _HEAD if getattr(made, "head_dim", None) else None,
        "intermediate_size": 8 * _HEAD,
        "ffn_dim": 8 * _HEAD,
        "word_embed_proj_dim": few * _HEAD,
        "moe_intermediate_size": 2 * _HEAD,
        "shared_expert_intermediate_size": 2 * _HEAD,
        "rotary_dim": _HEAD // 2,
        "layer_types": list(made.layer_types[:layers])
        if getattr(made, "layer_types", None)
        else None,
    }
    names = getattr(made, "attribute_map", {})
    return {
        names.get(name, name): value
        for name, value in wanted.items()
        if value is not None and getattr(made, name, None) is not None
    }


def _few_layers(made: Any) -> int:
    """Return 2, or twice the number of first layers that contain every layer type."""
    kinds = getattr(made, "layer_types", None)
    if not kinds:
        return min(2, made.num_hidden_layers)
    count = next(n for n in range(1, len(kinds) + 1) if set(kinds[:n]) == set(kinds))
    return min(2 * count, made.num_hidden_layers)
