"""How far a preparation has come, so that the next one may go on after a kill or a power cut."""

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
    """What is on the disk for a request: splits up to a position of the corpus."""

    request: Mapping[str, Any]
    tokenizer: str  # where `load_tokenizer` finds it
    position: Position = BEGINNING
    written: Mapping[str, Written] | None = None  # by split; None: nothing yet

    def at(self, position: Position, written: Mapping[str, Written]) -> "Progress":
        return replace(self, position=position, written=written)


def unfinished(directory: Path) -> Path:
    """Where what only a later preparation needs is kept, such as a tokenizer just learned."""
    return directory / _DIRECTORY


def write_progress(directory: Path, progress: Progress) -> None:
    """Record the progress; what it says must be on the disk already."""
    record = {
        "request": progress.request,
        "tokenizer": progress.tokenizer,
        "position": progress.position,
        "written": progress.written,
    }
    with replacing(unfinished(directory) / "progress.json") as file:
        file.write(json.dumps(record).encode())


def read_progress(directory: Path, request: Mapping[str, Any]) -> Progress | None:
    """The progress of the same request; None where there is none, or it is another's."""
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
        return None  # absent or damaged: begin again


def remove_progress(directory: Path) -> None:
    shutil.rmtree(unfinished(directory), ignore_errors=True)
