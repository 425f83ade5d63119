"""Small models of the same architecture, for the parity check of large ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from graphtrain.config.hf_config import read_config, with_overrides
from graphtrain.errors import ImportedModelError
from graphtrain.torch_frontend.meta_module import build_on_meta, parameter_count
from graphtrain.torch_frontend.module_factory import factory
from graphtrain.torch_frontend.transformers_model import with_special_floats

if TYPE_CHECKING:
    from graphtrain.config.schema import TorchModel

FULL_SIZE_LIMIT = 20_000_000  # weights up to which a model is compared at full size
_LIMIT = 200_000_000  # weights up to which a model is compared at all
_HEAD = 16  # head_dim
_VISION_LAYERS = 4  # two that attend to windows and two that do not


def shrink_model(model: TorchModel) -> tuple[TorchModel, dict[str, Any]]:
    """Return the model to compare, and the overrides that make it smaller.

    It has no rows that pad the vocabulary, whose masked logits would dwarf all others.

    Raises:
        ImportedModelError: the model is still too large.
    """
    model, overrides = model.without_padding(), dict(model.parity)
    small = replace(model, overrides=with_overrides(model.overrides, overrides), parity={})
    count = parameter_count(build_on_meta(factory(small)))
    if count <= FULL_SIZE_LIMIT:
        return small, overrides
    if model.hf is not None:
        config = read_config(model.hf, model.overrides)
        overrides = with_overrides(_small_overrides(config), overrides)
        small = replace(model, overrides=with_overrides(model.overrides, overrides), parity={})
        count = parameter_count(build_on_meta(factory(small)))
    if count > _LIMIT:
        raise ImportedModelError(
            f"the model has {count:,} parameters, too many to compare with PyTorch on this host; "
            "set [program.model.parity] to overrides that make it small, for example {layers = 2}"
        )
    return small, overrides


def _small_overrides(config: dict[str, Any]) -> dict[str, Any]:
    """Return overrides for few layers and narrow heads; ratios and layer types are unchanged."""
    from transformers import AutoConfig

    settings = with_special_floats(
        {name: value for name, value in config.items() if name != "model_type"}
    )
    hf_config = AutoConfig.for_model(config["model_type"], **settings)
    if isinstance(config.get("vision_config"), dict):
        return _small_parts(hf_config, config)
    return _small_values(hf_config)


def _small_parts(hf_config: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return overrides of the text and of the vision tower of a model of text and images.

    Older files state the settings of the text beside the others, without a part for them.
    """
    stated = config.get("text_config")
    is_flat = not isinstance(stated, dict)
    vision, text = hf_config.vision_config, _small_values(hf_config.get_text_config())
    rotary = getattr(hf_config.get_text_config(), "rope_parameters", None) or {}
    if sections := rotary.get("mrope_section"):
        small_rotary = rotary | {"mrope_section": _small_sections(sections)}
        of_text = config if is_flat else stated
        # Of two names for the same, transformers prefers the older one.
        name = "rope_scaling" if of_text.get("rope_scaling") else "rope_parameters"
        text[name] = small_rotary
    # The language model may read the hidden state after some block from the end.
    read = getattr(hf_config, "vision_feature_layer", None) or 0
    most = max(map(abs, read)) if isinstance(read, list | tuple) else abs(read)
    layers = min(max(_VISION_LAYERS, most + 1), vision.num_hidden_layers)
    small = _small_values(vision, layers)
    if getattr(vision, "fullatt_block_indexes", None):
        small["fullatt_block_indexes"] = list(range(1, layers, 2))
    if getattr(vision, "out_hidden_size", None):
        small["out_hidden_size"] = text["hidden_size"]
    return (text if is_flat else {"text_config": text}) | {"vision_config": small}


def _small_sections(sections: list[int]) -> list[int]:
    """Return sections of a head's rotary pairs in about the same ratios."""
    total, pairs = sum(sections), _HEAD // 2
    first, second = (max(1, size * pairs // total) for size in sections[:2])
    return [first, second, pairs - first - second]


def _small_values(hf_config: Any, layers: int | None = None) -> dict[str, Any]:
    """Return overrides of one part; without `layers`, of as few as contain every layer type."""
    heads, kv_heads = hf_config.num_attention_heads, getattr(hf_config, "num_key_value_heads", None)
    group = heads // kv_heads if kv_heads else 1
    small_heads = 2 * group if group <= 8 else group
    layers = layers or _few_layers(hf_config)
    small_values: dict[str, Any] = {
        "num_hidden_layers": layers,
        "num_attention_heads": small_heads,
        "hidden_size": small_heads * _HEAD,
        "num_key_value_heads": small_heads // group if kv_heads else None,
        "head_dim": _HEAD if getattr(hf_config, "head_dim", None) else None,
        "intermediate_size": 8 * _HEAD,
        "ffn_dim": 8 * _HEAD,
        "word_embed_proj_dim": small_heads * _HEAD,
        "moe_intermediate_size": 2 * _HEAD,
        "shared_expert_intermediate_size": 2 * _HEAD,
        "rotary_dim": _HEAD // 2,
        "layer_types": list(hf_config.layer_types[:layers])
        if getattr(hf_config, "layer_types", None)
        else None,
    }
    names = getattr(hf_config, "attribute_map", {})
    return {
        names.get(name, name): value
        for name, value in small_values.items()
        if value is not None and getattr(hf_config, name, None) is not None
    }


def _few_layers(hf_config: Any) -> int:
    """Return 2, or twice the number of first layers that contain every layer type."""
    layer_types = getattr(hf_config, "layer_types", None)
    if not layer_types:
        return min(2, hf_config.num_hidden_layers)
    count = next(
        n for n in range(1, len(layer_types) + 1) if set(layer_types[:n]) == set(layer_types)
    )
    return min(2 * count, hf_config.num_hidden_layers)
