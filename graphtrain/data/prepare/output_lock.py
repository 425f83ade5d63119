"""Lock of an output directory, so that one process at a time prepares a dataset there.

It is a lease, because not every file system has locks; see `lowering.machine.leases`.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lowering.machine import leases
from lowering.machine.leases import DEFAULT_TIMING, Lease, LeaseTiming, end_process

_LEASE = ".lease"


@contextmanager
def locked_output(directory: Path, pace: LeaseTiming = DEFAULT_TIMING) -> Iterator[None]:
    """Create a directory, and hold its lock during the block, after waiting for another process.

    Directories that were created here and are still empty at the end are removed again.

    Args:
        directory: output directory.
        pace: heartbeat interval and expiry of the lease.

    Raises:
        OSError: the directory or the lock cannot be created.
    """
    created = leases.create_directory(directory)
    lease = Lease(
        directory / _LEASE, pace, on_lost=lambda: end_process(directory, "prepares data in")
    )
    try:
        with leases.hold(lease, lambda owner: _say_wait(directory, owner)):
            yield
    finally:
        leases.remove_unused(created, lease)


def _say_wait(directory: Path, owner: str) -> None:
    warnings.warn(
        f"waiting for another process that prepares data in {directory}: {owner}; choose another "
        f"--output, or if it is not running, remove {directory / _LEASE}",
        stacklevel=2,
    )
