"""Files that appear whole under their name, or not at all."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def partial_path(path: Path) -> Path:
    """Where a file is written before it takes its name; a later attempt writes over it."""
    return path.with_name(path.name + ".partial")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file's name to errors of the system: writing, unlike opening, does not say it."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def settle(file: BinaryIO) -> None:
    """Write what is buffered and wait for the disk: a full one must be noticed before a rename."""
    file.flush()
    os.fsync(file.fileno())
    file.close()


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file that takes the name `path` when the block ends, and is removed when it raises."""
    partial = partial_path(path)
    try:
        with naming(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as file:
                yield file
                settle(file)
            partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def content_digest(path: Path) -> str:
    """The digest of a file's bytes, whatever its name."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
