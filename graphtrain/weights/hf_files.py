"""Files of a Hugging Face folder other than weights: config.json, tokenizer, licence."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

from graphtrain.config.hf_config import read_config_json
from graphtrain.config.hf_quantization import QUANTIZATION_CONFIG
from graphtrain.errors import WeightsError
from sharding_rules.documents import DocumentError

_WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|h5|msgpack|gguf|onnx)|.*\.index\.json")


def read_config(directory: Path) -> dict[str, Any]:
    """Read the config.json of a folder.

    Raises:
        WeightsError: it is missing or not a JSON object.
    """
    path = directory / "config.json"
    try:
        return read_config_json(path)
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror}") from error
    except DocumentError as error:
        raise WeightsError(f"{path} cannot be used: {error}") from error


def copy_hf_files(source: Path, destination: Path) -> None:
    """Copy all files except weights: configuration, tokenizer, chat template, code, licence."""
    destination.mkdir(exist_ok=True)
    root = _real_root(source)
    for path in source.iterdir():
        if _WEIGHTS.fullmatch(path.name) or not path.is_file():
            continue
        if not path.resolve().is_relative_to(root):
            warnings.warn(
                f"{path} is a link to a file outside {root} and is not copied; replace it by the "
                "file if it belongs to the model",
                stacklevel=2,
            )
            continue
        shutil.copyfile(path, destination / path.name)


def _real_root(source: Path) -> Path:
    """Return the folder that the files of a Hugging Face folder may be in, links resolved.

    In the cache of the hub, files are links from models--NAME/snapshots/COMMIT to
    models--NAME/blobs; elsewhere, links must stay in the folder.
    """
    real = source.resolve()
    repository = real.parent.parent
    in_hub_cache = real.parent.name == "snapshots" and repository.name.startswith("models--")
    return repository if in_hub_cache else real


def copy_exported_hf_files(source: Path, destination: Path) -> None:
    """Copy all files except weights; config.json without the quantization of the original ones."""
    copy_hf_files(source, destination)
    path = destination / "config.json"
    config = read_config(destination) if path.is_file() else {}
    if config.pop(QUANTIZATION_CONFIG, None) is not None:
        path.write_text(json.dumps(config, indent=2) + "\n")
