"""Native models of about the sizes of an imported model's vision tower, for estimates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from graphtrain.config.hf_config import first_int, read_config
from graphtrain.config.hf_images import ImageLayout, computed_blocks, image_layout
from graphtrain.config.schema import Model
from graphtrain.config.tower import Tower

if TYPE_CHECKING:
    from graphtrain.config.schema import TorchModel

_TOWERS_OF_LLAVA = ("clip_vision_model", "siglip_vision_model")


def tower_equivalent(model: TorchModel, *, build: bool = True) -> Tower | None:
    """Return the vision tower of a model; None if it has no images, or a tower of another kind.

    Args:
        model: The imported model.
        build: Whether the module may be built, for settings that config.json leaves to defaults.
    """
    layout = image_layout(model)
    if layout is None:
        return None
    config = image_text_config(model, build=build)
    vision = config.get("vision_config")
    kinds = {"llava": _tower_of_llava, "qwen2_5_vl": _tower_of_qwen}
    if not isinstance(vision, dict) or config.get("model_type") not in kinds:
        return None
    try:
        return kinds[config["model_type"]](model, config, vision, layout)
    except (KeyError, TypeError, ValidationError):  # not stated, or damaged
        return None


def image_text_config(model: TorchModel, *, build: bool) -> Mapping[str, Any]:
    """Return a configuration with the parts of text and images, complete if it may be built."""
    assert model.hf is not None
    if not build:
        return read_config(model.hf, model.overrides)
    from graphtrain.torch_frontend.language_model import TorchLanguageModel

    module: Any = TorchLanguageModel(model).opened().meta.module
    return module.config.to_dict()


def _tower_of_llava(
    model: TorchModel, config: Mapping[str, Any], vision: Mapping[str, Any], layout: ImageLayout
) -> Tower:
    kind, computed = vision.get("model_type"), computed_blocks(config)
    one_state = isinstance(config.get("vision_feature_layer", -2), int)
    if kind not in _TOWERS_OF_LLAVA or computed is None or not one_state:
        raise KeyError("vision_config")
    layers, has_class_token = vision["num_hidden_layers"], kind == _TOWERS_OF_LLAVA[0]
    patches = layout.grid[0] * layout.grid[1]
    embed, text = vision["hidden_size"], config["text_config"]["hidden_size"]
    blocks = _blocks(
        model,
        layers=computed,
        embed=embed,
        heads=vision["num_attention_heads"],
        mlp=vision["intermediate_size"],
        vocab=3 * vision["patch_size"] ** 2,
        activation="gelu",
        norm="layer",
        positions="learned",
        max_position_embeddings=patches + has_class_token,
    )
    return Tower(
        model=blocks,
        images=layout.images,
        tokens=patches + has_class_token,
        attended=patches + has_class_token,
        idle_layers=layers - computed,
        projection=((text, embed), (text, text)),
        features=layout.tokens,
    )


def _tower_of_qwen(
    model: TorchModel, config: Mapping[str, Any], vision: Mapping[str, Any], layout: ImageLayout
) -> Tower:
    layers, embed, merge = vision["depth"], vision["hidden_size"], vision["spatial_merge_size"]
    patches = layout.tokens * merge**2
    side = vision["window_size"] // vision["patch_size"]
    full = len(vision["fullatt_block_indexes"])
    blocks = _blocks(
        model,
        layers=layers,
        embed=embed,
        heads=vision["num_heads"],
        mlp=vision["intermediate_size"],
        vocab=3 * vision["temporal_patch_size"] * vision["patch_size"] ** 2,
        activation="swiglu",
    )
    merged = embed * merge**2
    return Tower(
        model=blocks,
        images=layout.images,
        tokens=patches,
        attended=(full * patches + (layers - full) * min(side**2, patches)) / layers,
        idle_layers=0,
        projection=((merged, merged), (vision["out_hidden_size"], merged)),
        features=layout.tokens,
    )


def _blocks(model: TorchModel, **sizes: Any) -> Model:
    return Model(
        **sizes,
        bias="all",
        tie_word_embeddings=True,
        dtype=model.dtype,
        remat=model.remat,
        attention="dense",  # no kernel without a causal mask
    )


def language_model_config(model: TorchModel, *, build: bool) -> Mapping[str, Any]:
    """Return the configuration of the language model behind a vision tower."""
    config = image_text_config(model, build=build)
    text = config.get("text_config")
    tied = first_int(config, ("tie_word_embeddings",))
    own = text if isinstance(text, dict) else config
    return own if tied is None else {**own, "tie_word_embeddings": bool(tied)}
