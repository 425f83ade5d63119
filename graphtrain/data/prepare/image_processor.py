"""Image processor of a model's folder: resized pixels, and how many tokens stand for an image.

The processor is that of transformers, in its form for Pillow, so that pixels do not depend on
whether torchvision is installed.
"""

import hashlib
import importlib.metadata
import json
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from graphtrain.data.prepare.chat_templates import Template, find_template
from graphtrain.data.tokenizers.protocol import Tokenizer
from graphtrain.errors import DataError
from lowering.machine.extras import optional_import
from sharding_rules.documents import DocumentError, read_object

_PROCESSOR, _PREPROCESSOR = "processor_config.json", "preprocessor_config.json"
# Files that name the class of the processor, in the order in which AutoProcessor reads them.
_FILES = (_PROCESSOR, _PREPROCESSOR, "tokenizer_config.json")
_EARLIER_TEMPLATE = "chat_template.json"  # of earlier versions of transformers
_CLIP = "clip_vision_model"
_LLAVA, _QWEN = "LlavaProcessor", "Qwen2_5_VLProcessor"
_IMAGE_TOKENS = {_LLAVA: "<image>", _QWEN: "<|image_pad|>"}  # unless a file names another one
_BY_MODEL = {"llava": _LLAVA, "qwen2_5_vl": _QWEN}


@dataclass(frozen=True)
class FolderProcessor:
    """Processor of a folder; loaded when it is used first, in each process."""

    folder: str
    name: str  # class
    image_token: str  # text of the placeholder
    digest: str  # of its settings, and of the versions of what computes the pixels

    @classmethod
    def open(cls, folder: Path) -> "FolderProcessor":
        """Read the settings of a folder, and load its image processor.

        Raises:
            DataError: the folder has no processor, or an unsupported one.
        """
        files = _folder_files(folder)
        name, token = _class_of(folder, files), _image_token(folder, files)
        _load(str(folder))  # before the versions: raises if the extra is not installed
        return cls(str(folder), name, token, _digest(name, token, files))

    def template(self, tokenizer: Tokenizer) -> Template:
        """Return the chat template of the folder, from the file that AutoProcessor reads first.

        Raises:
            DataError: it has none, or one that is not valid.

        Source: `get_processor_dict` of ProcessorMixin of transformers
        """
        earlier = Path(self.folder) / _EARLIER_TEMPLATE
        found = find_template(str(earlier) if earlier.is_file() else "own", tokenizer)
        return replace(found, name="own")

    def pixels(self, image: Any, size: tuple[int, int] | None = None) -> np.ndarray:
        """Return the pixels of an image as the processor resizes and crops it.

        Args:
            image: A `PIL.Image.Image`.
            size: Height and width; an image that the processor makes another size of is resized to
                them before. None: as the processor does by itself.

        Returns:
            (height, width, 3) uint8, before rescaling and normalization.

        Raises:
            ValueError: the processor refuses the image, or makes another size of it.
        """
        pixels = self._processed(image)
        if size is None or pixels.shape[:2] == size:
            return pixels
        resample = _load(self.folder).resample
        pixels = self._processed(image.resize(size[::-1], resample=resample))
        if pixels.shape[:2] != size:
            height, width = pixels.shape[:2]
            raise ValueError(
                f"makes {height} x {width} pixels of an image of {size[0]} x {size[1]}"
            )
        return pixels

    def tokens(self, height: int, width: int) -> int:
        """Return how many placeholders stand for an image of this size.

        Raises:
            DataError: the folder does not say it.

        Source: `replace_image_token` of LlavaProcessor and Qwen2_5_VLProcessor of transformers
        """
        processor = _load(self.folder)
        if self.name == _QWEN:
            unit = processor.patch_size * processor.merge_size
            return (height // unit) * (width // unit)
        settings = _read(Path(self.folder) / _PROCESSOR)
        patch = settings.get("patch_size")
        if not isinstance(patch, int) or patch < 1:
            raise DataError(
                f"{self.folder}/{_PROCESSOR}: has no patch_size, which LlavaProcessor needs to "
                "count the tokens of an image; set it to that of the vision tower"
            )
        additional = settings.get("num_additional_image_tokens") or 0
        vision = _read(Path(self.folder) / "config.json").get("vision_config")
        if isinstance(vision, dict) and vision.get("model_type") == _CLIP and not additional:
            raise DataError(
                f"{self.folder}/{_PROCESSOR}: num_additional_image_tokens is {additional}, but the "
                "vision tower has a class token; set it to 1"
            )
        count = (height // patch) * (width // patch) + additional
        return count - (settings.get("vision_feature_select_strategy") == "default")

    def _processed(self, image: Any) -> np.ndarray:
        processor = _load(self.folder)
        made = processor(images=[image], do_rescale=False, do_normalize=False, return_tensors="np")
        values = made["pixel_values"]
        if self.name == _QWEN:
            _, rows, columns = made["image_grid_thw"][0].tolist()
            values = _without_patches(values, rows, columns, processor)
        else:
            values = values[0].transpose(1, 2, 0)
        pixels = values.astype(np.uint8)
        if pixels.shape[-1:] != (3,) or not np.array_equal(pixels, values):
            raise ValueError("does not make pixels of three channels with 8 bits each")
        return pixels


def _without_patches(patches: np.ndarray, rows: int, columns: int, processor: Any) -> np.ndarray:
    """Undo the cut of an image into patches: (rows * columns, values) to (height, width, 3).

    Source: `patchify` of Qwen2VLImageProcessor of transformers
    """
    merge, size = processor.merge_size, processor.patch_size
    cut = patches.reshape(
        rows // merge, columns // merge, merge, merge, -1, processor.temporal_patch_size, size, size
    )[..., 0, :, :]  # every frame is the same
    return cut.transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * size, columns * size, -1)


def _class_of(folder: Path, files: dict[str, dict[str, Any]]) -> str:
    """Return the name of the processor's class, as AutoProcessor of transformers finds it."""
    named = [name for file in _FILES if (name := files[file].get("processor_class"))]
    by_model = _BY_MODEL.get(str(files["config.json"].get("model_type")))
    name = next(iter(named), by_model)
    if name not in _IMAGE_TOKENS:
        raise DataError(
            f"--processor {folder}: its processor is {name or 'not named by any file'}; images are "
            f"prepared for {' and '.join(_IMAGE_TOKENS)}"
        )
    return name


def processor_digest(folder: Path) -> str:
    """Return the digest of the processor of a folder, without loading it.

    Raises:
        DataError: the folder has no processor, or an unsupported one.
        PackageNotFoundError: transformers or Pillow is not installed.
    """
    files = _folder_files(folder)
    return _digest(_class_of(folder, files), _image_token(folder, files), files)


def _folder_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the contents of the files that describe the processor of a folder, by name."""
    if not folder.is_dir():
        raise DataError(f"--processor {folder}: is not a folder; name that of the model")
    return {name: _read(folder / name) for name in (*_FILES, "config.json")}


def _image_token(folder: Path, files: dict[str, dict[str, Any]]) -> str:
    """Return the text of the placeholder that the files name, else that of the class."""
    named = (files[name].get("image_token") for name in (_FILES[2], _PROCESSOR))
    default = _IMAGE_TOKENS[_class_of(folder, files)]
    return next((text for text in named if isinstance(text, str)), default)


def _digest(name: str, token: str, files: dict[str, dict[str, Any]]) -> str:
    """Return the digest of a processor: of its settings, and of what computes the pixels."""
    settings = {file: files[file] for file in (_PROCESSOR, _PREPROCESSOR)}
    versions = [importlib.metadata.version(one) for one in ("transformers", "pillow")]
    identity = json.dumps([name, token, settings, versions], sort_keys=True)
    return hashlib.sha256(identity.encode()).hexdigest()


@lru_cache(maxsize=2)
def _load(folder: str) -> Any:
    """Load the image processor of a folder, without code of the folder."""
    with optional_import("--processor", "vision"):
        import PIL  # noqa: F401, which transformers would miss with another message
        from transformers import AutoImageProcessor
    try:
        return AutoImageProcessor.from_pretrained(
            folder, backend="pil", local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # of transformers, which has no class for its errors
        raise DataError(
            f"--processor {folder}: transformers cannot load its image processor "
            f"({str(error).strip().partition(chr(10))[0][:300]})"
        ) from None


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return read_object(path)
    except (OSError, DocumentError) as error:
        raise DataError(f"{path}: cannot be used: {error}") from None
