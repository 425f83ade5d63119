"""Files: they appear complete under their name, or not at all; JSON has the types it should have.

Each path must have one writer at a time. The cache, into which several processes write the same
entries, has its own functions (`graphtrain.cache.writing`): their temporary files have unique names
that tell whose they are, so that leftovers can be collected.
"""

import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from graphtrain.errors import OutputExists, TrainingError, WeightsError
from sharding_rules.documents import DocumentError

if TYPE_CHECKING:
    from pydantic import ValidationError

_T = TypeVar("_T")


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: "1 document", "2 documents"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


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


@contextmanager
def write_new(path: Path) -> Iterator[BinaryIO]:
    """Write a file as `atomic_write`, unless it exists with other content.

    Raises:
        OutputExists: it does.
    """
    partial = partial_path(path)
    with atomic_write(partial) as file:
        yield file
    try:
        if path.exists() and content_digest(path) != content_digest(partial):
            raise output_exists(path)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def output_exists(path: Path | str) -> OutputExists:
    """Return the error about output that exists already."""
    return OutputExists(
        f"{path} exists already with other content; remove it or choose another name"
    )


@contextmanager
def create_directory(destination: Path) -> Iterator[Path]:
    """Yield a temporary folder, and rename it to `destination` if the block succeeds.

    Raises:
        WeightsError: `destination` exists and is not an empty directory, or writing fails.
    """
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise WeightsError(f"{destination} exists already; remove it or choose another name")
    unfinished = destination.with_name(f".{destination.name}.unfinished")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        yield unfinished
        if destination.exists():
            destination.rmdir()
        unfinished.rename(destination)
    except OSError as error:
        raise WeightsError(f"{destination} cannot be written: {error}") from error
    finally:
        _remove_directory(unfinished)


def _remove_directory(directory: Path) -> None:
    """Remove a directory, with retries: after an error TensorStore still completes writes."""
    for _ in range(20):
        if not directory.exists():
            return
        shutil.rmtree(directory, ignore_errors=True)
        time.sleep(0.1)


@contextmanager
def write_errors(directory: Path) -> Iterator[None]:
    """Convert an OSError on writing to a run directory to a TrainingError with a remedy.

    Raises:
        TrainingError: the block raised an OSError.
    """
    try:
        yield
    except OSError as error:
        raise TrainingError(
            f"{directory} cannot be written ({error.strerror or error}); {_write_remedy(error)}set "
            "run.directory to another path"
        ) from error


def _write_remedy(error: OSError) -> str:
    """Return what to do where a file cannot be written, as the beginning of "..., or ..."."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free space there, or "
    if error.errno in (errno.EEXIST, errno.ENOTDIR) and error.filename:
        path = Path(error.filename)
        in_the_way = next((one for one in (path, *path.parents) if one.is_file()), path)
        return f"remove the file {in_the_way}, or "
    return ""


def content_digest(path: Path) -> str:
    """Return the SHA-256 digest of the content of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_digest(value: Any) -> str:
    """Return the SHA-256 digest of a JSON value, in the form that JSON gives back."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def validate(schema: type[_T], value: Any) -> _T:
    """Return a JSON value as an instance of a dataclass or TypedDict.

    Raises:
        DocumentError: the value does not have this type; the message names the first entry.
    """
    from pydantic import ValidationError  # not needed until a file is read

    try:
        # Through JSON, because the strict mode of pydantic refuses dictionaries for dataclasses.
        return _adapter(schema).validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        raise DocumentError(first_problem(error)) from None


def first_problem(error: "ValidationError") -> str:
    """Return the first problem of a value that pydantic refuses, in one line."""
    problem = error.errors(include_url=False, include_input=False)[0]
    location, message = ".".join(map(str, problem["loc"]))[:200], problem["msg"]
    return f"{location}: {message}" if location else message


@cache
def _adapter(schema: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(schema)
