"""Images of a Hugging Face model, by the files in its folder; imports neither it nor PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphtrain.config.hf_config import config_path, first_int, read_config
from graphtrain.errors import ImportedModelError
from sharding_rules.documents import DocumentError, read_object

if TYPE_CHECKING:
    from graphtrain.config.schema import TorchModel

# Files of an image processor. transformers reads the first one that has settings of images.
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
_WITH_CLASS_TOKEN = "clip_vision_model"  # the only tower of Llava whose first feature is no patch
_TOKEN_NAMES = ("image_token_id", "image_token_index")
_PATCH_NAMES = ("patch_size", "spatial_patch_size")


@dataclass(frozen=True)
class ImageLayout:
    """Images of one sequence: how many it has at most, their size, and their tokens."""

    images: int  # images of a sequence
    height: int  # in pixels
    width: int
    token: int  # id of the placeholder, which stands in the tokens in place of an image's features
    tokens: int  # placeholders of one image
    grid: tuple[int, int]  # rows and columns of features of one image


@dataclass(frozen=True)
class Normalization:
    """Rescaling and normalization of pixels, whose values are 0 to 255."""

    rescale_factor: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


def stated_image_size(hf: str, overrides: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return height and width of the only images that a model takes; None if it takes others, too.

    Raises:
        ImportedModelError: its config.json cannot be read.
    """
    vision = _vision_config(hf, read_config(hf, overrides))
    size = vision.get("image_size")
    if isinstance(size, int) and not isinstance(size, bool):
        return size, size
    if isinstance(size, list) and len(size) == 2 and all(isinstance(side, int) for side in size):
        return size[0], size[1]
    return None


def image_layout(model: TorchModel) -> ImageLayout | None:
    """Return the images of a model's sequences; None if program.model.images is 0.

    The number of placeholders is that of Llava or, if the tower merges patches, that of Qwen2.5-VL;
    the trace of the model checks it.

    Raises:
        ImportedModelError: config.json does not describe a model of text and images, or its tower
            does not divide images of program.model.image_size.
    """
    if not model.images:
        return None
    assert model.hf is not None and model.image_size is not None
    config = read_config(model.hf, model.overrides)
    vision, (height, width) = _vision_config(model.hf, config), model.image_size
    token, patch = first_int(config, _TOKEN_NAMES), first_int(vision, _PATCH_NAMES)
    for names, value in ((_TOKEN_NAMES, token), (_PATCH_NAMES, patch)):
        if not value:
            raise ImportedModelError(
                f"program.model.images = {model.images}: {config_path(model.hf)} has no {names[0]},"
                " which a model of text and images needs"
            )
    assert token is not None and patch is not None
    merge = first_int(vision, ("spatial_merge_size",)) or 1
    unit = patch * merge
    if height % unit or width % unit:
        raise ImportedModelError(
            f"program.model.image_size = [{height}, {width}]: the vision tower divides images into "
            f"squares of {unit} x {unit} pixels; use multiples of {unit}"
        )
    grid = height // unit, width // unit
    tokens = grid[0] * grid[1] + _other_features(config, vision)
    return ImageLayout(model.images, height, width, token, tokens, grid)


def computed_blocks(config: Mapping[str, Any]) -> int | None:
    """Return how many blocks of a vision tower a model computes; None: all, or unknown.

    Llava reads the hidden state before the last block, unless `vision_feature_layer` says another.

    Args:
        config: Content of config.json.
    """
    vision = config.get("vision_config")
    layers = first_int(vision, ("num_hidden_layers",)) if isinstance(vision, dict) else None
    if layers is None or "llava" not in str(config.get("model_type")):
        return None
    read = config.get("vision_feature_layer", -2)
    states = read if isinstance(read, list) else [read]
    if not states or not all(isinstance(state, int) for state in states):
        return None
    return max(state if state >= 0 else layers + 1 + state for state in states)


def _other_features(config: Mapping[str, Any], vision: Mapping[str, Any]) -> int:
    """Return how many features of an image a model reads beyond those of patches; -1: one fewer.

    Llava drops the first feature by default, that of a class token. Settings that are not stated
    have the defaults of transformers.
    """
    is_llava = "llava" in str(config.get("model_type"))
    if not is_llava and "vision_feature_select_strategy" not in config:
        return 0
    has_class_token = vision.get("model_type", _WITH_CLASS_TOKEN) == _WITH_CLASS_TOKEN
    drops_first = config.get("vision_feature_select_strategy", "default") == "default"
    return int(has_class_token) - int(drops_first)


def _vision_config(hf: str, config: Mapping[str, Any]) -> Mapping[str, Any]:
    vision = config.get("vision_config")
    if not isinstance(vision, dict):
        raise ImportedModelError(
            f"program.model.images: {config_path(hf)} has no vision_config, so the model takes no "
            "images; set images = 0"
        )
    return vision


def read_normalization(hf: str) -> Normalization:
    """Read the normalization of pixels from the image processor beside a config.json.

    Raises:
        ImportedModelError: there is no such file, or it does not say how.
    """
    folder = config_path(hf).parent
    path, settings = _processor_settings(folder)
    factor, mean, std = 1.0, (0.0,) * 3, (1.0,) * 3
    if _setting(settings, "do_rescale", True):
        factor = _setting(settings, "rescale_factor", 1 / 255)
    if _setting(settings, "do_normalize", True):
        mean, std = (tuple(_setting(settings, name, ())) for name in ("image_mean", "image_std"))
    numbers = [factor, *mean, *std]
    if len(numbers) != 7 or not all(isinstance(number, int | float) for number in numbers):
        raise ImportedModelError(
            f"{path} does not state how pixels are normalized: rescale_factor = {factor}, "
            f"image_mean = {list(mean)}, image_std = {list(std)}; state all three"
        )
    return Normalization(float(factor), mean, std)  # pyright: ignore[reportArgumentType]


def _processor_settings(folder: Path) -> tuple[Path, Mapping[str, Any]]:
    """Return the file of an image processor, and its settings.

    processor_config.json may have those of the processor of texts alone.

    Source: transformers 5.24, image_processing_base.py, get_image_processor_dict.
    """
    for name in PROCESSOR_FILES:
        path = folder / name
        try:
            settings = read_object(path) if path.is_file() else {}
        except (OSError, DocumentError) as error:
            raise ImportedModelError(f"{path} cannot be used: {error}") from None
        if name == PROCESSOR_FILES[0]:
            settings = settings.get("image_processor", {})
        if settings:
            return path, settings
    raise ImportedModelError(
        f"program.model.images: {folder} has no {PROCESSOR_FILES[1]}, which says how pixels "
        "are normalized; copy it from the model's folder"
    )


def _setting(settings: Mapping[str, Any], name: str, default: Any) -> Any:
    value = settings.get(name)
    return default if value is None else value
