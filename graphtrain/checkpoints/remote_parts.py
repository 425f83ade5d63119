"""Checkpoints that the hosts of a run upload together, each the pieces on its own disk.

All use one prefix. Each host writes a record of the pieces that it has uploaded, or of the reason
why it cannot; rank 0 waits for the records of all, and writes the manifest last. The records are
then deleted:

    v1/files/<step>-<seconds>-<random>/parts/<number>.json
    v1/files/<step>-<seconds>-<random>/checkpoint/about/...  of rank 0
    v1/files/<step>-<seconds>-<random>/checkpoint/pieces/...
"""

from __future__ import annotations

import json
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from graphtrain.cache.store_errors import UnusableObject
from graphtrain.checkpoints.host_tier import METADATA, PART, Part
from graphtrain.checkpoints.info import CheckpointInfo, decode_checkpoint_info, read_checkpoint_info
from graphtrain.checkpoints.manifest import DamagedCheckpoint, recorded_files, verify_files
from graphtrain.checkpoints.pieces import FOLDER, all_pieces
from graphtrain.checkpoints.remote import RemoteCheckpoints
from graphtrain.checkpoints.remote_manifest import (
    MAX_MANIFEST_BYTES,
    DamagedRemoteCheckpoint,
    RemoteFile,
    RemoteManifest,
)
from graphtrain.errors import TrainingError
from graphtrain.files import json_digest, validate
from sharding_rules.documents import parse_object, read_object


@dataclass(frozen=True)
class PartSource:
    """A part on a disk of this host, whose pieces it uploads."""

    number: int
    directory: str
    names: list[str] | None = None  # pieces; None for all of the part


@dataclass(frozen=True)
class PartsUpload:
    """The parts of a step that one host uploads, and the numbers of all."""

    prefix: str
    sources: list[PartSource]
    numbers: list[int]  # of the parts of all hosts
    is_last: bool  # whether this host writes the manifest


@dataclass(frozen=True)
class _Record:
    """Pieces of a part that are in the store."""

    pieces: dict[str, RemoteFile]
    refused: str | None = None  # why none are, and never will be

    def encode(self) -> bytes:
        content = asdict(self)
        return json.dumps(content | {"digest": json_digest(content)}).encode()


class RefusedPart(TrainingError):
    """A host cannot upload its part of a step, so that the step is never complete in the store."""


def upload_parts(remote: RemoteCheckpoints, upload: PartsUpload) -> None:
    """Upload the pieces of this host, and the records of them. They are verified first.

    Raises:
        DamagedCheckpoint: a file is not as it was written.
        CacheError: an object cannot be written.
    """
    for source in upload.sources:
        directory = Path(source.directory)
        verify_files(directory)
        names = source.names
        if names is None:
            names = [name for name in recorded_files(directory) if name.startswith(f"{FOLDER}/")]
        files = remote.put_files(upload.prefix, {name: directory / name for name in names})
        remote.store.put(_record_name(upload.prefix, source.number), _Record(files).encode())


def refuse_parts(remote: RemoteCheckpoints, upload: PartsUpload, reason: str) -> None:
    """Record that this host cannot upload its parts, for which rank 0 would wait.

    Raises:
        CacheError: the record cannot be written.
    """
    record = _Record({}, f"host {socket.gethostname()} cannot upload its part: {reason}")
    for source in upload.sources:
        remote.store.put(_record_name(upload.prefix, source.number), record.encode())


class UploadedParts:
    """Records of the parts of a step that hosts have uploaded.

    Args:
        remote: The store.
        step: The step.
        upload: Its parts.
    """

    def __init__(self, remote: RemoteCheckpoints, step: int, upload: PartsUpload) -> None:
        self._remote, self._step, self._upload = remote, step, upload
        self._records: dict[int, dict[str, RemoteFile]] = {}

    def are_complete(self) -> bool:
        """Read the records that have been written; return whether all have.

        Raises:
            RefusedPart: a host cannot upload its part.
            DamagedRemoteCheckpoint: a record is damaged.
            CacheError: the store cannot be read.
        """
        for number in self._upload.numbers:
            if number not in self._records:
                name = _record_name(self._upload.prefix, number)
                data = self._remote.store.get(name, MAX_MANIFEST_BYTES)
                if data is None:
                    return False
                record = self._decode(name, data)
                if record.refused is not None:
                    raise RefusedPart(record.refused)
                self._records[number] = record.pieces
        return True

    def finish(self, run_directory: Path) -> RemoteManifest:
        """Write the manifest: all parts are there.

        Raises:
            DamagedRemoteCheckpoint: pieces are missing, or hosts have different ones.
            CacheError: an object cannot be written. Then the checkpoint does not exist there.
        """
        source = Path(self._upload.sources[0].directory)
        info = read_checkpoint_info(source.parent, self._step)
        pieces = self._joined(info, validate(Part, read_object(source / PART)))
        about = self._remote.put_files(
            self._upload.prefix, {name: source / name for name in (METADATA, PART)}
        )
        place = self._step, self._upload.prefix
        return self._remote.complete(*place, {**about, **pieces}, run_directory, info)

    def delete_records(self) -> None:
        """Delete the records, which are of no use when the manifest is there.

        Raises:
            CacheError: one cannot be deleted.
        """
        for number in self._upload.numbers:
            self._remote.store.delete(_record_name(self._upload.prefix, number))

    def _joined(self, info: CheckpointInfo, part: Part) -> dict[str, RemoteFile]:
        joined: dict[str, RemoteFile] = {}
        for record in self._records.values():
            for name, file in record.items():
                if joined.setdefault(name, file) != file:
                    raise self._damaged(f"two hosts have different contents of {name}")
        if missing := set(all_pieces(info.arrays, part.shapes)).difference(joined):
            raise self._damaged(f"no host has uploaded {min(missing)}")
        return joined

    def _decode(self, name: str, data: bytes) -> _Record:
        try:
            content = parse_object(data)
            if content.pop("digest", None) == json_digest(content):
                return validate(_Record, content)
        except ValueError:
            pass
        raise self._damaged(f"{name} does not have the digest it was written with")

    def _damaged(self, reason: str) -> DamagedRemoteCheckpoint:
        return DamagedRemoteCheckpoint(self._remote.url, self._step, reason)


@dataclass(frozen=True)
class RemoteStep:
    """A step in the store that consists of pieces of hosts, of which each host reads some."""

    remote: RemoteCheckpoints
    manifest: RemoteManifest
    part: Part
    info: CheckpointInfo

    def read(self, name: str) -> bytes:
        """Return a piece.

        Raises:
            DamagedRemoteCheckpoint: it is missing, or not as it was uploaded.
            CacheError: the store cannot be read.
        """
        return self.remote.read_file(self.manifest, name)


def open_remote_step(remote: RemoteCheckpoints, manifest: RemoteManifest) -> RemoteStep | None:
    """Return a step whose pieces can be read one by one; None if it was uploaded as a whole.

    Raises:
        DamagedRemoteCheckpoint: its metadata are missing or damaged.
        CacheError: the store cannot be read.
    """
    if PART not in manifest.checkpoint:
        return None
    step = manifest.step
    try:
        part = validate(Part, parse_object(remote.read_file(manifest, PART)))
        metadata = parse_object(remote.read_file(manifest, METADATA))
        return RemoteStep(
            remote, manifest, part, decode_checkpoint_info(metadata, Path(remote.url), step)
        )
    except (DamagedCheckpoint, UnusableObject, ValueError, KeyError) as error:
        raise DamagedRemoteCheckpoint(remote.url, step, str(error)) from error


def _record_name(prefix: str, number: int) -> str:
    return f"{prefix}/parts/{number}.json"
