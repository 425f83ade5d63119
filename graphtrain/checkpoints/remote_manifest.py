"""Manifest of a checkpoint in an object store: the objects that it consists of, with digests.

It is the last object that is written, and the first that is deleted, so a checkpoint whose manifest
exists is complete. The names of its objects contain a random part, so that a second upload of the
same step never changes the objects of the first:

    v1/steps/<step>.json                     manifest
    v1/files/<step>-<seconds>-<random>/...   files of the checkpoint, and of the run
"""

from __future__ import annotations

import json
import re
import secrets
import time
from dataclasses import asdict, dataclass, field
from pathlib import PurePosixPath
from typing import Any

from graphtrain.errors import TrainingError
from graphtrain.files import json_digest, validate
from sharding_rules.documents import parse_object

STEPS, FILES = "v1/steps/", "v1/files/"
MAX_MANIFEST_BYTES = 64 << 20  # an entry of a file has some 150 bytes
_VERSION = 1
_MANIFEST_NAME = re.compile(rf"{STEPS}([0-9]{{1,18}})\.json", re.ASCII)
_PREFIX = re.compile(rf"{FILES}([0-9]{{1,18}})-([0-9]{{1,12}})-[0-9a-f]{{8}}", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}")


class DamagedRemoteCheckpoint(TrainingError):
    """A checkpoint in an object store is not as it was uploaded.

    Args:
        url: Object store.
        step: Step of the checkpoint.
        reason: The object, and what is wrong with it.
    """

    def __init__(self, url: str, step: int, reason: str) -> None:
        super().__init__(f"{url}, step {step} is damaged: {reason}; use another checkpoint")
        self.step, self.reason = step, reason


@dataclass(frozen=True)
class RemoteFile:
    """Size and digest of one object."""

    size: int
    sha256: str


@dataclass(frozen=True)
class RemoteManifest:
    """Contents of a manifest."""

    step: int
    uploaded_at: str  # UTC, as 2026-01-31T12:00:00Z
    prefix: str  # of the names of its objects
    checkpoint: dict[str, RemoteFile]  # by name, relative to the directory of the checkpoint
    run: dict[str, RemoteFile] = field(default_factory=dict)  # relative to that of the run
    validation_loss: float | None = None

    @property
    def nbytes(self) -> int:
        """Size of all files of the checkpoint and the run."""
        return sum(file.size for file in (*self.checkpoint.values(), *self.run.values()))

    def objects(self) -> dict[str, RemoteFile]:
        """Return all files by the names of their objects."""
        return {
            **{f"{self.prefix}/checkpoint/{name}": file for name, file in self.checkpoint.items()},
            **{f"{self.prefix}/run/{name}": file for name, file in self.run.items()},
        }

    def encode(self) -> bytes:
        """Return the manifest as JSON, with a digest of itself."""
        content: dict[str, Any] = {"version": _VERSION, **asdict(self)}
        return json.dumps(content | {"digest": json_digest(content)}, indent=1).encode()


def decode_manifest(data: bytes, step: int) -> RemoteManifest:
    """Return the manifest of a step.

    Raises:
        ValueError: it is damaged, of another step, or names files outside of its directories.
    """
    content = parse_object(data)
    if content.pop("digest", None) != json_digest(content):
        raise ValueError("its manifest does not have the digest it was written with")
    if content.pop("version", None) != _VERSION:
        raise ValueError(f"its manifest has another version than {_VERSION}")
    manifest = validate(RemoteManifest, content)
    named = _PREFIX.fullmatch(manifest.prefix)
    if manifest.step != step or named is None or int(named[1]) != step:
        raise ValueError(f"its manifest is of step {manifest.step}")
    for name, file in (*manifest.checkpoint.items(), *manifest.run.items()):
        if not is_inside(name) or file.size < 0 or not _SHA256.fullmatch(file.sha256):
            raise ValueError(f"its manifest has a wrong entry, {name[:100]!r}")
    return manifest


def is_inside(name: str) -> bool:
    """Return whether a name is that of a file below a directory, in its only spelling."""
    path = PurePosixPath(name)
    is_plain = "\\" not in name and "\0" not in name and str(path) == name
    return is_plain and not path.is_absolute() and ".." not in path.parts and name != "."


def manifest_name(step: int) -> str:
    """Return the name of the manifest of a step."""
    return f"{STEPS}{step}.json"


def step_of(name: str) -> int | None:
    """Return the step whose manifest has a name; None for any other object."""
    found = _MANIFEST_NAME.fullmatch(name)
    return int(found[1]) if found else None


def new_prefix(step: int) -> str:
    """Return a prefix for the objects of a new upload."""
    return f"{FILES}{step}-{int(time.time())}-{secrets.token_hex(4)}"


def prefix_of(name: str) -> tuple[str, int] | None:
    """Return the prefix of an object of an upload, and when the upload began, in seconds."""
    prefix = "/".join(name.split("/")[:3])
    found = _PREFIX.fullmatch(prefix)
    return (prefix, int(found[2])) if found else None
