"""Saved progress of a preparation, to resume it after a kill or a power failure."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from graphtrain.data.indexed.writer import Written
from graphtrain.data.readers.corpus import BEGINNING, Position
from graphtrain.data.readers.records import Place
from graphtrain.files import replacing

_DIRECTORY = ".unfinished"


@dataclass(frozen=True)
class Progress:
    """Files on disk for a request: its splits up to a position of the corpus."""

    request: Mapping[str, Any]
    tokenizer: str  # argument of `load_tokenizer`
    position: Position = BEGINNING
    written: Mapping[str, Written] | None = None  # by split; None: nothing yet

    def at(self, position: Position, written: Mapping[str, Written]) -> "Progress":
        """Return a copy at another position."""
        return replace(self, position=position, written=written)


def unfinished(directory: Path) -> Path:
    """Return the folder of files needed only to resume, such as a newly trained tokenizer."""
    return directory / _DIRECTORY


def write_progress(directory: Path, progress: Progress) -> None:
    """Save the progress; all that it lists must already be on disk."""
    record = {
        "request": progress.request,
        "tokenizer": progress.tokenizer,
        "position": progress.position,
        "written": progress.written,
    }
    with replacing(unfinished(directory) / "progress.json") as file:
        file.write(json.dumps(record).encode())


def read_progress(directory: Path, request: Mapping[str, Any]) -> Progress | None:
    """Return the saved progress of a request; None if there is none for this request."""
    try:
        record = json.loads((unfinished(directory) / "progress.json").read_text())
        if record["request"] != json.loads(json.dumps(request)):
            return None
        file, place, documents = record["position"]
        written = record["written"]
        return Progress(
            request,
            record["tokenizer"],
            Position(file, Place(*place), documents),
            written and {name: Written(*counts) for name, counts in written.items()},
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None  # absent or damaged: start from the beginning


def remove_progress(directory: Path) -> None:
    """Remove the saved progress of a directory."""
    shutil.rmtree(unfinished(directory), ignore_errors=True)
