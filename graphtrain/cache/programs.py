"""Stored programs: record.json and payload in one directory."""

import errno
import hashlib
import json
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

from graphtrain.cache.authentication import EntryAuthenticator
from graphtrain.cache.key import CacheKey, to_json_types
from graphtrain.cache.layout import SCHEMA
from graphtrain.errors import CacheError
from lowering.artifact import Artifact

RECORD, PAYLOAD, CODE = "record.json", "payload", "code"
MAX_JSON_BYTES = 256 * 1024 * 1024  # a record has kilobytes, or megabytes with long plans
_MAX_CODE_BYTES = 1024


class CacheWarning(UserWarning):
    """A cache entry could not be used; its program must be compiled again."""


class UnusableEntry(Exception):
    """A cache entry cannot be used; the message is the reason."""


class DamagedEntry(UnusableEntry):
    """The entry on disk is missing or differs from what was written."""


class ForeignEntry(UnusableEntry):
    """The entry was not stored by this user, so that it is not loaded."""

    def __init__(self) -> None:
        super().__init__("this user did not store it here, so it is not loaded")


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


def authenticate(authenticator: EntryAuthenticator, digest: str, record: bytes) -> bytes:
    """Return the contents of the file `code` for a record; they also cover the payload's digest.

    Raises:
        CacheError: the secret of this user cannot be read or created.
    """
    return authenticator.code("program", digest, hashlib.sha256(record).hexdigest()).encode()


def read_record(directory: Path, digest: str) -> dict[str, Any]:
    """Read record.json for display, whoever stored it; verify its checksum and key.

    Raises:
        UnusableEntry: the record is missing, damaged, or of another version.
        CacheError: the record cannot be read.
    """
    return decode_record(read_bytes(directory / RECORD), digest)


def decode_record(data: bytes, digest: str) -> dict[str, Any]:
    """Parse record.json; verify its checksum, its fields, and that it belongs to this digest.

    Raises:
        UnusableEntry: the record is damaged, or of another version.
    """
    body = parse(data, RECORD)
    if body.pop("sha256", None) != _body_digest(body):
        raise DamagedEntry(f"{RECORD} does not match its checksum")
    if not _has_fields(body):
        raise DamagedEntry(f"{RECORD} has no valid key, payload, record or created")
    try:
        key = CacheKey.from_json(body["key"])
    except (TypeError, RecursionError) as error:  # for example NaN
        raise DamagedEntry(f"{RECORD} has no valid key") from error
    if key.digest != digest:
        raise DamagedEntry(f"{RECORD} belongs to another program")
    return body


def read(directory: Path, digest: str, authenticator: EntryAuthenticator) -> Artifact:
    """Read the artifact of an entry that this user may load; verify its size and checksum.

    Raises:
        UnusableEntry: record or payload is missing, damaged, foreign, or of another version.
        CacheError: record or payload cannot be read.
    """
    body = _read_own_record(directory, digest, authenticator)
    with _open_payload(directory, body) as file:
        payload = file.read()
    _check_contents(body, hashlib.sha256(payload).hexdigest())
    return Artifact(payload, body["record"])


def check(
    directory: Path, digest: str, authenticator: EntryAuthenticator, *, contents: bool
) -> None:
    """Verify an entry without loading its payload into memory.

    Args:
        directory: directory of the entry.
        digest: expected program digest.
        authenticator: decides which entries this user may load.
        contents: also verify the payload's checksum, not only its size.

    Raises:
        UnusableEntry: record or payload is missing, damaged, foreign, or of another version.
        CacheError: record or payload cannot be read.
    """
    body = _read_own_record(directory, digest, authenticator)
    with _open_payload(directory, body) as file:
        if contents:
            _check_contents(body, hashlib.file_digest(file, "sha256").hexdigest())


def check_imported(record: bytes, payload: bytes, digest: str) -> None:
    """Verify that record and payload from a remote cache belong to each other and to the digest.

    Raises:
        UnusableEntry: they do not.
    """
    body = decode_record(record, digest)
    _check_size(body, len(payload))
    _check_contents(body, hashlib.sha256(payload).hexdigest())


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
    except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
        raise DamagedEntry(f"{name} is not JSON") from error
    if not isinstance(body, dict):
        raise DamagedEntry(f"{name} is not a JSON object")
    schema = body.get("schema")
    if schema != SCHEMA:
        version = schema if isinstance(schema, int) else "of no version"
        raise OtherSchemaVersion(f"{name} has schema {version}; this graphtrain reads {SCHEMA}")
    return body


def read_bytes(path: Path | str, limit: int = MAX_JSON_BYTES) -> bytes:
    """Return the contents of a file of the cache.

    Raises:
        DamagedEntry: there is no such file, it is larger than `limit`, or not a regular file.
        CacheError: the file cannot be read.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise DamagedEntry(
                f"{Path(path).name} has {size} bytes, more than the limit of {limit}"
            )
        return file.read()


@contextmanager
def open_regular(path: Path | str) -> Iterator[FileIO]:
    """Open a file of the cache for reading; a named pipe, at which open would wait, is refused.

    Raises:
        DamagedEntry: there is no such file, or it is not a regular file.
        CacheError: the file cannot be read.
    """
    with read_errors(path), open(path, "rb", 0, opener=_open_without_waiting) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise DamagedEntry(f"{Path(path).name} is not a regular file")
        yield file


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def exists(path: Path) -> bool:
    """Return whether a file or directory of the cache exists.

    Raises:
        CacheError: its existence cannot be determined.
    """
    with read_errors(path):
        return path.exists()


@contextmanager
def read_errors(path: Path | str) -> Iterator[None]:
    """Convert an OSError of the block into an error about reading `path`.

    Raises:
        DamagedEntry: there is no such file.
        CacheError: the file cannot be read.
    """
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DamagedEntry(f"{Path(path).name} is missing") from error
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


def _read_own_record(
    directory: Path, digest: str, authenticator: EntryAuthenticator
) -> dict[str, Any]:
    """Read record.json of an entry that this user may load.

    A record with this user's code needs no other check. Other records are checked, to report
    damage as such.

    Raises:
        UnusableEntry: the record is missing, damaged, foreign, or of another version.
    """
    data = read_bytes(directory / RECORD)
    record_digest = hashlib.sha256(data).hexdigest()
    if authenticator.is_own(_read_code(directory), "program", digest, record_digest):
        return parse(data, RECORD)
    body = decode_record(data, digest)
    if not authenticator.trusts_directory:
        raise ForeignEntry
    return body


def _read_code(directory: Path) -> str:
    try:
        return read_bytes(directory / CODE, _MAX_CODE_BYTES).decode(errors="replace").strip()
    except DamagedEntry:
        return ""


@contextmanager
def _open_payload(directory: Path, body: dict[str, Any]) -> Iterator[FileIO]:
    """Open the payload after comparing its size with the record.

    Raises:
        DamagedEntry: it is missing, has another size, or is not a regular file.
    """
    with open_regular(directory / PAYLOAD) as file:
        _check_size(body, os.fstat(file.fileno()).st_size)
        yield file


def _check_size(body: dict[str, Any], size: int) -> None:
    want = body["payload"]["bytes"]
    if size != want:
        raise DamagedEntry(f"{PAYLOAD} has {size} bytes instead of {want}")


def _check_contents(body: dict[str, Any], digest: str) -> None:
    if digest != body["payload"]["sha256"]:
        raise DamagedEntry(f"{PAYLOAD} does not match its checksum (sha256)")


def _has_fields(body: dict[str, Any]) -> bool:
    payload = body.get("payload")
    return (
        isinstance(body.get("key"), dict)
        and isinstance(body.get("record"), dict)
        and isinstance(body.get("created"), str)
        and isinstance(payload, dict)
        and isinstance(payload.get("sha256"), str)
        and type(payload.get("bytes")) is int
        and payload["bytes"] >= 0
    )


def _body_digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, separators=(",", ":")).encode()).hexdigest()
