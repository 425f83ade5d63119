"""Lock of an output directory, so that one process at a time prepares a dataset there.

It is a lease, because not every file system has locks; see `lowering.machine.leases`.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lowering.machine import leases
from lowering.machine.leases import DEFAULT_TIMING, Lease, LeaseTiming, end_process

_LEASE = ".lease"


@contextmanager
def locked_output(directory: Path, pace: LeaseTiming = DEFAULT_TIMING) -> Iterator[None]:
    """Create a directory, and hold its lock during the block, after waiting for another process.

    A directory that was created here and is still empty at the end is removed again.

    Args:
        directory: output directory.
        pace: heartbeat interval and expiry of the lease.

    Raises:
        OSError: the directory or the lock cannot be created.
    """
    new = not directory.exists()
    directory.mkdir(parents=True, exist_ok=True)
    lease = Lease(
        directory / _LEASE, pace, on_lost=lambda: end_process(directory, "prepares data in")
    )
    try:
        with leases.hold(lease, lambda owner: _say_wait(directory, owner)):
            yield
    finally:
        if new:
            _remove_if_empty(directory)


def _remove_if_empty(directory: Path) -> None:
    """Remove a directory that holds only a lease that nobody owns."""
    lease = directory / _LEASE
    with suppress(OSError):  # another process owns the lease by now, or has removed it
        if list(directory.iterdir()) == [lease]:
            for free in lease.glob("*.free"):
                free.unlink()
            lease.rmdir()
            directory.rmdir()


def _say_wait(directory: Path, owner: str) -> None:
    warnings.warn(
        f"waiting for another process that prepares data in {directory}: {owner}; choose another "
        f"--output, or if it is not running, remove {directory / _LEASE}",
        stacklevel=2,
    )
