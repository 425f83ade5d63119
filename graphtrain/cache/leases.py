"""Leases of digests: only one process compiles a key; others wait or compile something else.

An owner that was only paused, and resumes after its lease expired, still stores its program. That
is harmless, because entries are keyed by content and created atomically.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from graphtrain.cache.layout import StorePaths
from graphtrain.cache.writing import write_errors
from lowering.machine import leases
from lowering.machine.leases import LeaseTiming


class CacheLease(leases.Lease):
    """Lease of a digest, whose errors say what to do about the cache."""

    def try_acquire(self) -> bool:
        """Claim the lease if it is free or expired; return whether this claimant owns it now.

        Raises:
            CacheError: the lease cannot be created.
        """
        with write_errors(self.directory, 0):
            return super().try_acquire()


def hold_lease(
    layout: StorePaths, digest: str, on_wait: Callable[[str], None] | None, pace: LeaseTiming
) -> AbstractContextManager[None]:
    """Return a context that holds the lease of a digest, after waiting for it without a limit.

    Args:
        layout: paths of the cache.
        digest: digest of a request or a program.
        on_wait: called once with a description of the current owner, if there is one.
        pace: heartbeat interval and expiry.

    Raises:
        CacheError: the lease cannot be created.
    """
    return leases.hold(CacheLease(layout.lease(digest), pace), on_wait)


@contextmanager
def try_hold_all(layout: StorePaths, digests: Iterable[str], pace: LeaseTiming) -> Iterator[bool]:
    """Hold the leases of all digests and yield True; yield False if another process owns one."""
    with ExitStack() as held_leases:
        for digest in digests:
            directory = layout.lease(digest)
            if not directory.exists():
                continue  # never claimed; do not create a directory that would be left over
            lease = CacheLease(directory, pace)
            if not lease.try_acquire():
                yield False
                return
            held_leases.callback(lease.release)
        yield True
