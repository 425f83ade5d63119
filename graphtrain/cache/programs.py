"""Stored programs: record.json and payload in one directory."""

import errno
import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from graphtrain.cache.key import CacheKey, to_json_types
from graphtrain.cache.layout import SCHEMA
from graphtrain.errors import CacheError
from lowering.artifact import Artifact

RECORD, PAYLOAD = "record.json", "payload"


class CacheWarning(UserWarning):
    """A cache entry could not be used; its program must be compiled again."""


class UnusableEntry(Exception):
    """A cache entry cannot be used; the message is the reason."""


class DamagedEntry(UnusableEntry):
    """The entry on disk is missing or differs from what was written."""


class OtherSchemaVersion(UnusableEntry):
    """The entry has the schema of another version of graphtrain."""


def encode(key: CacheKey, artifact: Artifact) -> bytes:
    """Return the contents of record.json.

    Raises:
        TypeError: the artifact's record is not JSON.
    """
    body = {
        "schema": SCHEMA,
        "created": timestamp(),
        "key": key.to_json(),
        "payload": {
            "sha256": hashlib.sha256(artifact.payload).hexdigest(),
            "bytes": len(artifact.payload),
        },
        "record": to_json_types(artifact.record, "record"),
    }
    return json.dumps(body | {"sha256": _body_digest(body)}, indent=1).encode()


def read_record(directory: Path, digest: str) -> dict[str, Any]:
    """Read record.json, and verify its checksum and its digest against the directory name.

    Raises:
        UnusableEntry: the record is missing, damaged, or of another version.
        CacheError: the record cannot be read.
    """
    body = parse(read_bytes(directory / RECORD), RECORD)
    if body.pop("sha256", None) != _body_digest(body):
        raise DamagedEntry(f"{RECORD} does not match its checksum")
    if CacheKey.from_json(body["key"]).digest != digest:
        raise DamagedEntry(f"{RECORD} belongs to another program")
    return body


def read(directory: Path, digest: str) -> Artifact:
    """Read the artifact of an entry, and verify its size and checksum.

    Raises:
        UnusableEntry: record or payload is missing, damaged, or of another version.
        CacheError: record or payload cannot be read.
    """
    body = read_record(directory, digest)
    payload = read_bytes(directory / PAYLOAD)
    _check_size(body, len(payload))
    _check_contents(body, hashlib.sha256(payload).hexdigest())
    return Artifact(payload, body["record"])


def check(directory: Path, digest: str, *, contents: bool) -> None:
    """Verify an entry without loading its payload into memory.

    Args:
        directory: directory of the entry.
        digest: expected program digest.
        contents: also verify the payload's checksum, not only its size.

    Raises:
        UnusableEntry: record or payload is missing, damaged, or of another version.
        CacheError: record or payload cannot be read.
    """
    body = read_record(directory, digest)
    with read_errors(directory / PAYLOAD), open(directory / PAYLOAD, "rb") as file:
        _check_size(body, os.fstat(file.fileno()).st_size)
        if contents:
            _check_contents(body, hashlib.file_digest(file, "sha256").hexdigest())


def parse(data: bytes, name: str) -> dict[str, Any]:
    """Parse one of the cache's JSON files, if it has this version's schema.

    Args:
        data: contents of the file.
        name: name of the file in errors.

    Raises:
        UnusableEntry: the file is not a JSON object, or has the schema of another version.
    """
    try:
        body = json.loads(data)
    except ValueError as error:
        raise DamagedEntry(f"{name} is not JSON") from error
    if not isinstance(body, dict):
        raise DamagedEntry(f"{name} is not a JSON object")
    schema = body.get("schema")
    if schema != SCHEMA:
        raise OtherSchemaVersion(f"{name} has schema {schema}; this graphtrain reads {SCHEMA}")
    return body


def read_bytes(path: Path) -> bytes:
    """Return the contents of a file of the cache.

    Raises:
        DamagedEntry: there is no such file.
        CacheError: the file cannot be read.
    """
    with read_errors(path):
        return path.read_bytes()


def exists(path: Path) -> bool:
    """Return whether a file or directory of the cache exists.

    Raises:
        CacheError: its existence cannot be determined.
    """
    with read_errors(path):
        return path.exists()


@contextmanager
def read_errors(path: Path) -> Iterator[None]:
    """Convert an OSError of the block into an error about reading `path`.

    Raises:
        DamagedEntry: there is no such file.
        CacheError: the file cannot be read.
    """
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DamagedEntry(f"{path.name} is missing") from error
    except OSError as error:
        # not damaged: quarantine would not help, and another user may be able to read it
        raise CacheError(f"cannot read {path}: {error.strerror}") from error


@contextmanager
def list_errors(directory: Path) -> Iterator[None]:
    """Convert an OSError of the block into an error about listing `directory`.

    Over NFS, a file that another host has removed raises ESTALE instead of ENOENT.

    Raises:
        DamagedEntry: a file was removed meanwhile.
        CacheError: the directory cannot be read.
    """
    try:
        with read_errors(directory):
            yield
    except CacheError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.ESTALE:
            raise DamagedEntry("was removed") from error
        raise


def timestamp() -> str:
    """Return the current UTC time in ISO 8601, which sorts chronologically."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _check_size(body: dict[str, Any], size: int) -> None:
    want = body["payload"]["bytes"]
    if size != want:
        raise DamagedEntry(f"{PAYLOAD} has {size} bytes instead of {want}")


def _check_contents(body: dict[str, Any], digest: str) -> None:
    if digest != body["payload"]["sha256"]:
        raise DamagedEntry(f"{PAYLOAD} does not match its checksum (sha256)")


def _body_digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, separators=(",", ":")).encode()).hexdigest()
