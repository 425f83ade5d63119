"""Description of a checkpoint by its metadata: nothing of its arrays is read."""

import base64
import binascii
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graphtrain.checkpoints.host_tier import PART, Part
from graphtrain.checkpoints.info import read_checkpoint_info
from graphtrain.checkpoints.manifest import recorded_digests
from graphtrain.files import validate
from sharding_rules.documents import DocumentError, read_object


def describe_checkpoint(
    directory: Path, step: int, files: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the metadata of a checkpoint as JSON: arrays, identity, position of the data, files.

    Args:
        directory: Directory of the checkpoints.
        step: Step of the checkpoint.
        files: Size and digest of each file; None for those of its manifest.

    Raises:
        DamagedCheckpoint: the manifest is missing or damaged.
        TrainingError: the metadata cannot be read.
    """
    path = directory / str(step)
    info = read_checkpoint_info(directory, step)
    shardings = _shardings(path)
    return {
        "step": step,
        "validation_loss": info.validation_loss,
        "data_position": info.data_position,
        "changes": info.changes,
        "identity": info.identity,
        "arrays": {
            name: {"shape": shape, "dtype": dtype, "sharding": shardings.get(name, "unknown")}
            for name, (shape, dtype) in info.arrays.items()
        },
        "files": recorded_digests(path) if files is None else files,
    }


def _shardings(checkpoint_path: Path) -> dict[str, str]:
    """Return how each array was sharded when it was saved, which a restore need not repeat.

    Source: https://orbax.readthedocs.io, the file `_sharding`: JSON by the name in base64
    """
    try:
        if (checkpoint_path / PART).exists():
            part = validate(Part, read_object(checkpoint_path / PART))
            return {name: f"pieces of {shape}" for name, shape in part.shapes.items()}
        stored = read_object(checkpoint_path / "state" / "_sharding")
        return {
            base64.b64decode(name).decode().replace(".", "/"): _say_sharding(json.loads(text))
            for name, text in stored.items()
        }
    except (OSError, DocumentError, ValueError, binascii.Error, TypeError, AttributeError):
        return {}


def _say_sharding(sharding: dict[str, Any]) -> str:
    """Return the mesh axes of each dimension, as in "fsdp, tensor on data=2 fsdp=2 tensor=2"."""
    if sharding.get("sharding_type") != "NamedSharding":
        return str(sharding.get("device_str", sharding.get("sharding_type", "unknown")))
    names, sizes = sharding.get("axis_names", ()), sharding.get("shape", ())
    pairs = zip(names, sizes, strict=False)
    mesh = " ".join(f"{name}={size}" for name, size in pairs if size != 1) or "one device"
    spec = [
        "+".join(axes) if isinstance(axes, list) else axes or "-"
        for axes in sharding.get("partition_spec", ())
    ]
    return f"{', '.join(spec) or 'replicated'} on {mesh}"
