"""Checkpoints of a run as `graphtrain checkpoints` lists and removes them, here or remote."""

from __future__ import annotations

import calendar
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from graphtrain.checkpoints.arrays import array_shape
from graphtrain.checkpoints.info import read_checkpoint_info
from graphtrain.checkpoints.manifest import NAME as MANIFEST
from graphtrain.checkpoints.manifest import DamagedCheckpoint, verify_files
from graphtrain.checkpoints.output_directory import write_errors
from graphtrain.checkpoints.remote import RemoteCheckpoints
from graphtrain.checkpoints.remote_manifest import DamagedRemoteCheckpoint
from graphtrain.checkpoints.run_files import METRICS
from graphtrain.checkpoints.steps import Retention, saved_steps
from graphtrain.config.run_record import RECORD
from graphtrain.errors import TrainingError

Status = Literal["complete", "damaged", "quarantined"]
_QUARANTINED = re.compile(r"([0-9]{1,18})-[0-9]+", re.ASCII)  # name in the folder quarantine
# Directories of checkpoints that were never completed, or are being deleted.
_LEFTOVER = re.compile(r"[0-9]{1,18}\.(orbax-checkpoint-tmp.*|download|deleted)", re.ASCII)
_OF_RUN = ("checkpoints", "quarantine", METRICS, RECORD)


@dataclass(frozen=True)
class StoredCheckpoint:
    """One checkpoint, as its metadata describe it."""

    step: int
    saved_at: float  # seconds since 1970; of a remote one, when it was uploaded
    nbytes: int
    status: Status
    reason: str | None = None  # of damage
    validation_loss: float | None = None


def holds_run(directory: Path) -> bool:
    """Return whether a directory is that of a run, which may have no checkpoint yet."""
    # checkpoints may be a link to a disk that is lost.
    return any(os.path.lexists(directory / name) for name in _OF_RUN)


def list_local(run_directory: Path) -> list[StoredCheckpoint]:
    """Return the checkpoints of a run, oldest first, those in quarantine too.

    The size of every file is compared with the manifest; contents are left to `verify_local`.
    """
    directory = run_directory / "checkpoints"
    found = [_describe(directory, step) for step in saved_steps(directory)]
    quarantine = run_directory / "quarantine"
    for path in quarantine.iterdir() if quarantine.is_dir() else ():
        if name := _QUARANTINED.fullmatch(path.name):
            found.append(
                StoredCheckpoint(int(name[1]), _saved_at(path), _nbytes(path), "quarantined")
            )
    return sorted(found, key=lambda one: (one.step, one.status))


def _describe(directory: Path, step: int) -> StoredCheckpoint:
    path = directory / str(step)
    saved_at, nbytes = _saved_at(path), _nbytes(path)
    try:
        verify_files(path, only="about/")
        loss = read_checkpoint_info(directory, step).validation_loss
    except DamagedCheckpoint as error:
        return StoredCheckpoint(step, saved_at, nbytes, "damaged", error.reason)
    except TrainingError as error:
        return StoredCheckpoint(step, saved_at, nbytes, "damaged", str(error))
    return StoredCheckpoint(step, saved_at, nbytes, "complete", None, loss)


def _saved_at(path: Path) -> float:
    try:
        return (path / MANIFEST).stat().st_mtime
    except OSError:
        return path.stat().st_mtime


def _nbytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def list_remote(remote: RemoteCheckpoints) -> list[StoredCheckpoint]:
    """Return the complete checkpoints in an object store, oldest first.

    Raises:
        CacheError: the store cannot be read.
    """
    return [_describe_remote(remote, step) for step in remote.steps()]


def _describe_remote(remote: RemoteCheckpoints, step: int) -> StoredCheckpoint:
    try:
        manifest = remote.manifest(step)
    except DamagedRemoteCheckpoint as error:
        return StoredCheckpoint(step, 0.0, 0, "damaged", error.reason)
    uploaded_at = calendar.timegm(time.strptime(manifest.uploaded_at, "%Y-%m-%dT%H:%M:%SZ"))
    return StoredCheckpoint(
        step, uploaded_at, manifest.nbytes, "complete", None, manifest.validation_loss
    )


def verify_local(run_directory: Path, step: int) -> str | None:
    """Read every byte of a checkpoint; return the reason why it is damaged, or None.

    Each array that the checkpoint names must be there: a manifest may be of too few files.
    """
    directory = run_directory / "checkpoints"
    try:
        verify_files(directory / str(step))
        info = read_checkpoint_info(directory, step)
        for path, (shape, _) in info.arrays.items():
            if array_shape(directory / str(step), path) != tuple(shape):
                return f"{path} has another shape than it was saved with"
    except DamagedCheckpoint as error:
        return error.reason
    except TrainingError as error:
        return str(error)
    return None


def verify_remote(remote: RemoteCheckpoints, step: int) -> str | None:
    """Read every byte of a remote checkpoint; return the reason why it is damaged, or None.

    Raises:
        CacheError: the store cannot be read.
    """
    try:
        remote.verify(step)
    except DamagedRemoteCheckpoint as error:
        return error.reason
    return None


def superfluous(found: list[StoredCheckpoint], retention: Retention) -> list[int]:
    """Return the steps of the complete checkpoints that are not kept.

    Damaged ones are neither counted nor removed.
    """
    losses = {one.step: one.validation_loss for one in found if one.status == "complete"}
    return sorted(set(losses) - retention.kept(losses))


def leftovers(run_directory: Path) -> Iterator[Path]:
    """Yield the directories of checkpoints that were begun, by a run that ended, and not completed.

    The caller has locked the directory of the run.
    """
    directory = run_directory / "checkpoints"
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        if _LEFTOVER.fullmatch(path.name):
            yield path


def delete_local(run_directory: Path, step: int) -> None:
    """Delete a checkpoint; it disappears at once, whenever the deletion is interrupted.

    Raises:
        TrainingError: it cannot be deleted.
    """
    path = run_directory / "checkpoints" / str(step)
    with write_errors(run_directory):
        removed = path.with_name(f"{step}.deleted")
        shutil.rmtree(removed, ignore_errors=True)
        os.rename(path, removed)
        shutil.rmtree(removed)
