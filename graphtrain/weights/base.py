"""The base of a run that saves only what it trains: the same must be there to go on, or to export.

The run's directory keeps `base.json`: where the base was, and a digest of each of its files.
"""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from graphtrain.config import load_config
from graphtrain.config.schema import Config
from graphtrain.errors import WeightsError
from graphtrain.run.metrics import writing
from graphtrain.weights.sources import Source, open_source

_NAME = "base.json"


def keep_base(weights: Source, directory: Path) -> None:
    """Write down which base a run starts from.

    Raises:
        TrainingError: the directory cannot be written.
    """
    about = {"folder": str(weights.directory.absolute()), "files": _describe(weights, {})}
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        (directory / _NAME).write_text(json.dumps(about, indent=2) + "\n")


def check_base(weights: Source, directory: Path) -> None:
    """Refuse weights that are not those that a run started from.

    Files of the size and time that were written down count as unchanged; others are read.

    Raises:
        WeightsError: says which file differs.
    """
    kept = _kept(directory)["files"]
    now = _describe(weights, kept)
    for name in kept | now:
        if kept.get(name, {}).get("sha256") != now.get(name, {}).get("sha256"):
            raise WeightsError(
                f"{weights.directory} is not the base that {directory} was trained on: {name} "
                "differs; bring that base back, or set run.directory to a new one"
            )


def check_adapter(config: Config, directory: Path) -> None:
    """Refuse to go on with other adapters than a run was begun with, or its base rounded otherwise.

    No array tells: with another alpha the adapters that were saved would count for more or less.

    Raises:
        WeightsError: says which setting differs.
    """
    file, mine = directory / "config.toml", config.program.adapter
    theirs = load_config(file).program.adapter if file.is_file() else None
    if mine is None or theirs is None:
        return
    differ = [
        f"{name} = {getattr(mine, name)!r} (there {getattr(theirs, name)!r})"
        for name in ("rank", "alpha", "root_rank", "base")
        if getattr(mine, name) != getattr(theirs, name)
    ]
    if differ:
        raise WeightsError(
            f"{file}: the adapter was trained with other settings than [program.adapter], which "
            f"has {', '.join(differ)}; set them back, or set run.directory to a new one"
        )


def open_base(config: Config, directory: Path) -> Source:
    """The base of a run, from where run.initial says, else from where it was.

    Raises:
        WeightsError: it is not there, or another.
    """
    assert config.run.initial is not None
    named = Path(config.run.initial)
    weights = open_source(named if named.is_dir() else Path(_kept(directory)["folder"]))
    check_base(weights, directory)
    return weights


def _kept(directory: Path) -> dict[str, Any]:
    path = directory / _NAME
    try:
        kept = json.loads(path.read_text())
        files = {name: dict(about) for name, about in kept["files"].items()}
        return {"folder": str(kept["folder"]), "files": files}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(
            f"{path}, which says what {directory} was trained on, cannot be read: {error}"
        ) from error


def _describe(weights: Source, known: dict[str, Any]) -> dict[str, Any]:
    """Size, time and digest of every file; the digest is not made again of one that is known."""

    def describe(path: Path) -> dict[str, Any]:
        stat = path.stat()
        about = {"size": stat.st_size, "modified_ns": stat.st_mtime_ns}
        before = known.get(_name(weights, path), {})
        if about.items() <= before.items():
            return before
        with path.open("rb") as file:
            return about | {"sha256": hashlib.file_digest(file, "sha256").hexdigest()}

    files = weights.files
    with ThreadPoolExecutor() as pool:
        return {
            _name(weights, path): about
            for path, about in zip(files, pool.map(describe, files), strict=True)
        }


def _name(weights: Source, path: Path) -> str:
    inside = path.is_relative_to(weights.directory)
    return (path.relative_to(weights.directory) if inside else path).as_posix()
