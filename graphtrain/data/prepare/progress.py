"""Saved progress of a preparation, to resume it after a kill or a power failure."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from graphtrain.data.indexed.writer import WrittenCounts
from graphtrain.data.readers.corpus import CORPUS_START, CorpusPosition
from graphtrain.data.readers.records import FilePosition
from graphtrain.files import atomic_write
from sharding_rules.documents import read_json

_DIRECTORY = ".unfinished"


@dataclass(frozen=True)
class PrepareProgress:
    """Files on disk for a request: its splits up to a position of the corpus."""

    request: Mapping[str, Any]
    tokenizer: str  # argument of `load_tokenizer`
    position: CorpusPosition = CORPUS_START
    written: Mapping[str, WrittenCounts] | None = None  # by split; None: nothing yet

    def at_position(
        self, position: CorpusPosition, written: Mapping[str, WrittenCounts]
    ) -> "PrepareProgress":
        """Return a copy at another position."""
        return replace(self, position=position, written=written)


def resume_folder(directory: Path) -> Path:
    """Return the folder of files needed only to resume, such as a newly trained tokenizer."""
    return directory / _DIRECTORY


def write_progress(directory: Path, progress: PrepareProgress) -> None:
    """Save the progress; all that it lists must already be on disk."""
    record = {
        "request": progress.request,
        "tokenizer": progress.tokenizer,
        "position": progress.position,
        "written": progress.written,
    }
    with atomic_write(resume_folder(directory) / "progress.json") as file:
        file.write(json.dumps(record).encode())


def read_progress(directory: Path, request: Mapping[str, Any]) -> PrepareProgress | None:
    """Return the saved progress of a request; None if there is none for this request."""
    try:
        record = read_json(resume_folder(directory) / "progress.json")
        if record["request"] != json.loads(json.dumps(request)):
            return None
        file, file_position, documents = record["position"]
        written = record["written"]
        return PrepareProgress(
            request,
            record["tokenizer"],
            CorpusPosition(file, FilePosition(*file_position), documents),
            written and {name: WrittenCounts(*counts) for name, counts in written.items()},
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # absent or damaged: start from the beginning


def remove_progress(directory: Path) -> None:
    """Remove the saved progress of a directory."""
    shutil.rmtree(resume_folder(directory), ignore_errors=True)
