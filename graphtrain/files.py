"""Atomic replacement of files: they appear complete under their name, or not at all."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def partial_path(path: Path) -> Path:
    """Return the temporary path of a file until it is complete; later attempts overwrite it."""
    return path.with_name(path.name + ".partial")


@contextmanager
def with_file_name(path: Path) -> Iterator[None]:
    """Add the file name to operating system errors, which write errors do not contain."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def sync_and_close(file: BinaryIO) -> None:
    """Flush, sync to disk and close, so that a full disk is noticed before the rename."""
    file.flush()
    os.fsync(file.fileno())
    file.close()


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file, renamed to `path` at the end of the block, or removed on error."""
    partial = partial_path(path)
    try:
        with with_file_name(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as file:
                yield file
                sync_and_close(file)
            partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def content_digest(path: Path) -> str:
    """Return the SHA-256 digest of the content of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
