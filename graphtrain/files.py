"""Files: they appear complete under their name, or not at all; JSON has the types it should have.

Each path must have one writer at a time. The cache, into which several processes write the same
entries, has its own functions (`graphtrain.cache.writing`): their temporary files have unique names
that tell whose they are, so that leftovers can be collected.
"""

import difflib
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from sharding_rules.documents import DocumentError, read_object
from sharding_rules.errors import UserError

if TYPE_CHECKING:
    from pydantic import ValidationError

_T = TypeVar("_T")


class OutputExists(UserError):
    """A file that a command would write exists already, with other content."""


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: "1 document", "2 documents"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def partial_path(path: Path) -> Path:
    """Return the temporary path of a file until it is complete; later attempts overwrite it."""
    return path.with_name(path.name + ".partial")


@contextmanager
def with_file_name(path: Path) -> Iterator[None]:
    """Let operating system errors name the file; write errors name none, others the partial."""
    try:
        yield
    except OSError as error:
        if not error.filename or str(error.filename) == str(partial_path(path)):
            error.filename = str(path)  # the name that was asked for
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


def append_line(path: Path, text: str) -> None:
    """Append lines with one write; first terminate a truncated line of a killed process.

    Raises:
        OSError: the file cannot be written.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            text = "\n" + text
        os.write(descriptor, f"{text}\n".encode())
    finally:
        os.close(descriptor)


@contextmanager
def write_new(path: Path) -> Iterator[BinaryIO]:
    """Write a file as `atomic_write`, unless it exists with other content.

    Raises:
        OutputExists: it does.
    """
    partial = partial_path(path)
    with with_file_name(path), atomic_write(partial) as file:
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


def missing_dataset_file(prefix: str, suffix: str) -> str:
    """Return the message about a file of a dataset that does not exist, with what is there."""
    if prefix.endswith((".bin", ".idx")):
        hint = f"name the dataset without its suffix: {prefix[:-4]}"
    elif names := _dataset_names(Path(prefix)):
        return (
            f"{prefix}: is a directory, not a dataset; it holds {', '.join(names)}: name one of "
            f"them, for example {prefix.rstrip('/')}/{names[0]}"
        )
    elif Path(prefix).is_dir():
        hint = f"{prefix} is a directory without datasets"
    elif close := difflib.get_close_matches(prefix, _datasets_beside(prefix), n=1):
        hint = f"did you mean {close[0]}?"
    else:
        hint = "prepare the dataset with: graphtrain data prepare"
    return f"{prefix}{suffix}: no such file; {hint}"


def _dataset_names(directory: Path) -> list[str]:
    """Return the names of the datasets of a directory, without those of their other files."""
    names = sorted(path.stem for path in directory.glob("*.idx"))
    parts = {f"{name}{suffix}" for name in names for suffix in ("_learned", "_images")}
    return [name for name in names if name not in parts]


def _datasets_beside(prefix: str) -> list[str]:
    return [str(index.with_suffix("")) for index in Path(prefix).parent.glob("*.idx")]


def content_digest(path: Path) -> str:
    """Return the SHA-256 digest of the content of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_digest(value: Any) -> str:
    """Return the SHA-256 digest of a JSON value, in the form that JSON gives back."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def read_digested_object(path: Path) -> dict[str, Any]:
    """Read a JSON object that contains a digest of itself, "digest"; return the rest.

    Files of earlier versions contain none.

    Raises:
        OSError: the file cannot be opened or read.
        DocumentError: it is not a JSON object, or differs from its digest.
    """
    fields = read_object(path)
    digest = fields.pop("digest", None)
    if digest is not None and digest != json_digest(fields):
        raise DocumentError("it is not as it was written: its digest differs")
    return fields


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
    location = ".".join(map(str, problem["loc"]))[:200]
    if location and problem["type"] == "missing":
        return f"{location} is missing"
    is_unknown = problem["type"] in ("unexpected_keyword_argument", "extra_forbidden")
    message = "unknown" if is_unknown else problem["msg"]
    return f"{location}: {message.removeprefix('Input ')}" if location else message


@cache
def _adapter(schema: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(schema)
