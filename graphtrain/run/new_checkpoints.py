"""Checkpoints of a run that is being trained, as they are completed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from graphtrain.checkpoints.manifest import NAME as MANIFEST
from graphtrain.checkpoints.steps import saved_steps
from graphtrain.errors import TrainingError
from graphtrain.run.directory_lock import LEASE
from lowering.machine.leases import Lease

_POLL_SECONDS = 0.5


def new_checkpoints(directory: Path) -> Iterator[int]:
    """Yield the step of the last checkpoint, then of each new one, until no process trains the run.

    A step that the run repeats, as after --fresh, is new again. A checkpoint is complete; whether
    its files are sound is found out by reading it.

    Args:
        directory: Directory of the run.

    Raises:
        TrainingError: there is no checkpoint, and no process that will save one.
    """
    lease, seen, has_any = Lease(directory / LEASE), dict[int, object](), False
    while True:
        is_over = lease.is_free()  # asked first: what is saved before the end is found after it
        found = _checkpoints(directory / "checkpoints")
        new = [step for step in sorted(found) if step not in seen or found[step] != seen[step]]
        yield from new if has_any else new[-1:]
        seen, has_any = found, has_any or bool(found)
        if is_over:
            break
        time.sleep(_POLL_SECONDS)
    if not has_any:
        raise TrainingError(
            f"no checkpoint in {directory / 'checkpoints'}, and no process trains this run; start "
            "it first (graphtrain run)"
        )


def _checkpoints(directory: Path) -> dict[int, object]:
    """Return the steps of the complete checkpoints, each with what tells it from an earlier one."""
    return {step: _identity(directory / str(step)) for step in saved_steps(directory)}


def _identity(checkpoint: Path) -> object:
    """Return the inode and the time of the manifest, which is written once."""
    try:
        status = (checkpoint / MANIFEST).stat()
    except OSError:  # the run deletes it now, or an earlier version wrote none
        return None
    return status.st_ino, status.st_mtime_ns
