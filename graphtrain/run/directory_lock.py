"""Lock that gives one process the right to write into the directory of a run.

It is a lease (`lowering.machine.leases`), because not every file system has locks, and not every
network file system extends them across hosts. A run that was killed on this host is replaced at
once; one on another host when it has sent no heartbeat for 45 seconds.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from graphtrain.checkpoints.output_directory import write_errors
from graphtrain.errors import TrainingError
from lowering.machine import leases
from lowering.machine.leases import DEFAULT_TIMING, Lease, LeaseTiming, end_process

LEASE = ".lease"


@contextmanager
def locked_run_directory(directory: Path, pace: LeaseTiming = DEFAULT_TIMING) -> Iterator[None]:
    """Create and lock the directory of a run, so that no other process writes into it.

    Directories that were created here and are still empty at the end are removed again.

    Args:
        directory: directory of the run.
        pace: heartbeat interval and expiry of the lease.

    Raises:
        TrainingError: another process has the lock, or the directory cannot be written.
    """
    path = directory / LEASE
    lease = Lease(path, pace, on_lost=lambda: end_process(directory, "trains into"))
    with write_errors(directory):
        created = leases.create_directory(directory)
        is_owner = lease.acquire_unless_alive(lambda owner: _say_wait(directory, owner, pace))
    if not is_owner:
        raise TrainingError(
            f"another process is training into {directory}: {lease.owner()}; wait for its end, or "
            f"set run.directory to another location; if it is not running, remove {path}"
        )
    try:
        yield
    finally:
        lease.release()
        leases.remove_unused(created, lease)


def _say_wait(directory: Path, owner: str, pace: LeaseTiming) -> None:
    warnings.warn(
        f"{directory} is locked by {owner}; waiting up to {pace.expiry_seconds:.0f} s for its next "
        "heartbeat",
        stacklevel=2,
    )
