"""Base weights of a run with an adapter: recorded at its start, verified to resume or to export.

Such a run saves only its trainable parameters. Its directory therefore contains `base.json`, with
the folder of the base weights and a digest of each file.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from graphtrain.checkpoints.output_directory import write_errors
from graphtrain.config import load_config
from graphtrain.config.schema import Adapter
from graphtrain.errors import WeightsError
from graphtrain.files import atomic_write, content_digest
from sharding_rules.documents import read_json

NAME = "base.json"


class BaseFiles(Protocol):
    """Files of base weights, of a native or an imported model."""

    @property
    def directory(self) -> Path: ...

    @property
    def files(self) -> list[Path]: ...


def record_base(weights: BaseFiles, directory: Path) -> None:
    """Record in base.json which base weights a run starts from.

    Raises:
        TrainingError: the run directory is not writable.
    """
    record = {"folder": str(weights.directory.absolute()), "files": _describe(weights, {})}
    with write_errors(directory), atomic_write(directory / NAME) as file:
        file.write((json.dumps(record, indent=2) + "\n").encode())


def verify_base(weights: BaseFiles, directory: Path) -> None:
    """Raise unless these are the base weights that a run started from.

    Raises:
        WeightsError: a file differs, is missing or was added; the message names it.
    """
    if (name := different_base_file(weights, directory)) is not None:
        raise WeightsError(
            f"{weights.directory} does not contain the base weights that {directory} was "
            f"trained on: {name} differs; restore them, or set run.directory to a new directory"
        )


def different_base_file(weights: BaseFiles, directory: Path) -> str | None:
    """Return the name of a file in which weights differ from those that a run started from.

    Files with the recorded size and modification time count as unchanged; others are read.

    Raises:
        WeightsError: the record of the run cannot be read.
    """
    recorded = _read_record(directory)["files"]
    current = _describe(weights, recorded)
    for name in recorded | current:
        if recorded.get(name, {}).get("sha256") != current.get(name, {}).get("sha256"):
            return name
    return None


def verify_adapter_settings(adapter: Adapter | None, directory: Path) -> None:
    """Raise unless the adapter settings are those with which the run was started.

    Array shapes do not reveal such a change; for example another alpha would rescale the saved
    adapter, and another `base_dtype` would quantize the base weights differently.

    Raises:
        WeightsError: settings differ; the message names them.
    """
    file = directory / "config.toml"
    recorded = load_config(file).program.adapter if file.is_file() else None
    if adapter is None or recorded is None:
        return
    differences = [
        f"{name} = {getattr(adapter, name)!r} (instead of {getattr(recorded, name)!r})"
        for name in ("rank", "alpha", "use_rslora", "base_dtype")
        if getattr(adapter, name) != getattr(recorded, name)
    ]
    if differences:
        raise WeightsError(
            f"{file}: the adapter was trained with other settings than those in [program.adapter]: "
            f"{', '.join(differences)}; change them back, or set run.directory to a new directory"
        )


def recorded_folder(directory: Path) -> Path:
    """Return the folder of the base weights that a run started from.

    Raises:
        WeightsError: the record cannot be read.
    """
    return Path(_read_record(directory)["folder"])


def _read_record(directory: Path) -> dict[str, Any]:
    path = directory / NAME
    try:
        record = read_json(path)
        files = {name: dict(entry) for name, entry in record["files"].items()}
        return {"folder": str(record["folder"]), "files": files}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(
            f"{path}, the record of the base weights of {directory}, cannot be read: {error}"
        ) from error


def _describe(weights: BaseFiles, recorded: dict[str, Any]) -> dict[str, Any]:
    """Return size, modification time and digest of each file; reuse the digest if unchanged."""

    def describe(path: Path) -> dict[str, Any]:
        stat = path.stat()
        entry = {"size": stat.st_size, "modified_ns": stat.st_mtime_ns}
        previous = recorded.get(_name(weights, path), {})
        if entry.items() <= previous.items():
            return previous
        return entry | {"sha256": content_digest(path)}

    files = weights.files
    with ThreadPoolExecutor() as pool:
        return {
            _name(weights, path): entry
            for path, entry in zip(files, pool.map(describe, files), strict=True)
        }


def _name(weights: BaseFiles, path: Path) -> str:
    inside = path.is_relative_to(weights.directory)
    return (path.relative_to(weights.directory) if inside else path).as_posix()
