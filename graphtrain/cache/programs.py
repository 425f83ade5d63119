"""A stored program: record.json and payload in one directory."""

import errno
import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from graphtrain.cache.key import CacheKey, plain
from graphtrain.cache.layout import SCHEMA
from graphtrain.errors import CacheError
from lowering.artifact import Artifact

RECORD, PAYLOAD = "record.json", "payload"


class CacheWarning(UserWarning):
    """Something stored could not be used, and has to be compiled again."""


class Unusable(Exception):
    """Something stored cannot be used; the message is the reason."""


class Damaged(Unusable):
    """What is on the disk is not what was written."""


class OtherVersion(Unusable):
    """Written by another version of graphtrain, in a form that this one would misread."""


def encode(key: CacheKey, artifact: Artifact) -> bytes:
    """The text of record.json.

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
        "record": plain(artifact.record, "record"),
    }
    return json.dumps(body | {"sha256": _body_digest(body)}, indent=1).encode()


def read_record(directory: Path, digest: str) -> dict[str, Any]:
    """record.json, checked against its own digest and the name of its directory.

    Raises:
        Unusable: it is missing, damaged, or of another version.
        CacheError: it cannot be read.
    """
    body = parse(read_bytes(directory / RECORD), RECORD)
    if body.pop("sha256", None) != _body_digest(body):
        raise Damaged(f"{RECORD} is not as it was written")
    if CacheKey.from_json(body["key"]).digest != digest:
        raise Damaged(f"{RECORD} is of another program")
    return body


def read(directory: Path, digest: str) -> Artifact:
    """The artifact of an entry, its payload checked to be what was written.

    Raises:
        Unusable: something is missing, damaged, or of another version.
        CacheError: it cannot be read.
    """
    body = read_record(directory, digest)
    payload = read_bytes(directory / PAYLOAD)
    _check_size(body, len(payload))
    _check_contents(body, hashlib.sha256(payload).hexdigest())
    return Artifact(payload, body["record"])


def check(directory: Path, digest: str, *, contents: bool) -> None:
    """Check an entry without holding its payload: the size, and with contents every byte.

    Raises:
        Unusable: something is missing, damaged, or of another version.
        CacheError: it cannot be read.
    """
    body = read_record(directory, digest)
    with reading(directory / PAYLOAD), open(directory / PAYLOAD, "rb") as file:
        _check_size(body, os.fstat(file.fileno()).st_size)
        if contents:
            _check_contents(body, hashlib.file_digest(file, "sha256").hexdigest())


def parse(data: bytes, name: str) -> dict[str, Any]:
    """One of the store's JSON files, if it is of this version.

    Raises:
        Unusable: it is not JSON, or of another version.
    """
    try:
        body = json.loads(data)
    except ValueError as error:
        raise Damaged(f"{name} is not JSON") from error
    if not isinstance(body, dict):
        raise Damaged(f"{name} is not a JSON object")
    schema = body.get("schema")
    if schema != SCHEMA:
        raise OtherVersion(f"{name} has schema {schema}; this graphtrain reads {SCHEMA}")
    return body


def read_bytes(path: Path) -> bytes:
    """The contents of a file of the store.

    Raises:
        Damaged: there is no such file.
        CacheError: it cannot be read.
    """
    with reading(path):
        return path.read_bytes()


def is_present(path: Path) -> bool:
    """Whether something of the store is there.

    Raises:
        CacheError: that cannot be told.
    """
    with reading(path):
        return path.exists()


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Report what the system refuses inside as an error about path.

    Raises:
        Damaged: there is no such file.
        CacheError: it cannot be read.
    """
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise Damaged(f"{path.name} is missing") from error
    except OSError as error:
        # not damage: moving the entry away would not help, and another user may be able to read it
        raise CacheError(f"cannot read {path}: {error.strerror}") from error


@contextmanager
def listing(directory: Path) -> Iterator[None]:
    """As reading, of many: over NFS, what another host has removed is stale before it is missing.

    Raises:
        Damaged: a file went away.
        CacheError: the directory cannot be read.
    """
    try:
        with reading(directory):
            yield
    except CacheError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.ESTALE:
            raise Damaged("was removed") from error
        raise


def timestamp() -> str:
    """Now, in UTC; text of this form sorts by time."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _check_size(body: dict[str, Any], size: int) -> None:
    want = body["payload"]["bytes"]
    if size != want:
        raise Damaged(f"{PAYLOAD} has {size} bytes of {want}")


def _check_contents(body: dict[str, Any], digest: str) -> None:
    if digest != body["payload"]["sha256"]:
        raise Damaged(f"{PAYLOAD} is not as it was written: its sha256 differs")


def _body_digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, separators=(",", ":")).encode()).hexdigest()
