"""Leases: only one process, on any host, does a piece of work; others wait or do other work.

A lease is a directory with a numbered file for each claim. The highest number owns the lease until
the owner renames its file to mark it free, or until the owner has expired: it is dead according to
the kernel of the same host, or has sent no heartbeat for a while by the waiter's own clock, so host
clocks need not agree. A claim creates the next number exclusively (O_EXCL, which
also works on NFS). The highest file is never removed, so no process acts on a state that another
has undone. File locks of the operating system are not used, because not every network file system
extends them across hosts.

An owner that was only paused, and resumes after its lease expired, is told by `on_lost` at its next
heartbeat.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from lowering.machine import owners

_FREE = ".free"
# Seconds between polls of a lease that another process owns
_MIN_POLL_SECONDS, _MAX_POLL_SECONDS = 0.005, 0.5
_LOST_STATUS = 2


@dataclass(frozen=True)
class LeaseTiming:
    """Heartbeat interval of lease owners, and the silence after which a lease expires."""

    heartbeat_seconds: float = 5.0  # seconds between heartbeats
    expiry_seconds: float = 45.0  # seconds without a heartbeat
    host: str | None = None  # unique id of this host; None: ask the kernel


DEFAULT_TIMING = LeaseTiming()


class Lease:
    """Lease of one piece of work, from the point of view of one claimant."""

    def __init__(
        self,
        directory: Path,
        pace: LeaseTiming = DEFAULT_TIMING,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare to claim a lease; nothing is written.

        Args:
            directory: directory of the lease.
            pace: heartbeat interval and expiry.
            on_lost: called by the thread of the heartbeats if another claimant has considered this
                one expired, as after a long pause of its machine.
        """
        self.directory = directory
        self._pace = pace
        self._on_lost = on_lost
        self._number: int | None = None  # of this claimant's claim, while it owns the lease
        self._seen: tuple[int, int] | None = None  # number and last heartbeat of the other owner
        self._since = 0.0  # time.monotonic() when that heartbeat was first seen
        self._done = threading.Event()

    def try_acquire(self) -> bool:
        """Claim the lease if it is free or expired; return whether this claimant owns it now.

        Raises:
            OSError: the lease cannot be created.
        """
        if self._number is not None:
            return True
        highest, is_free = _highest(self.directory)
        if not is_free and not self._is_expired(highest):
            return False
        return self._claim(highest + 1)

    def is_free(self) -> bool:
        """Return whether the lease could be acquired now; nothing is written."""
        highest, is_free = _highest(self.directory)
        return is_free or self._is_expired(highest)

    def acquire_unless_alive(self, on_wait: Callable[[str], None]) -> bool:
        """Claim the lease unless its owner is alive; return whether this claimant owns it now.

        The kernel knows whether an owner on this host is alive. An owner on another host, or in
        another container, is alive if it sends a heartbeat while this claimant waits.

        Args:
            on_wait: called with a description of the owner, before such a wait.

        Raises:
            OSError: the lease cannot be created.
        """
        if self.try_acquire():
            return True
        claim_number, _ = _highest(self.directory)
        if owners.is_here(_read(self.directory / str(claim_number)), self._pace.host):
            return False
        heartbeat = self._seen
        on_wait(self.owner())
        while self._seen == heartbeat:
            time.sleep(_MAX_POLL_SECONDS)
            if self.try_acquire():
                return True
        return False

    def release(self) -> None:
        """Release the lease, if this claimant owns it."""
        if self._number is None:
            return
        self._done.set()
        path = self.directory / str(self._number)
        self._number = None
        with suppress(OSError):  # removed, if another claimant considered this one expired
            path.rename(path.with_name(path.name + _FREE))

    def owner(self) -> str:
        """Return a description of the current owner."""
        claim_number, _ = _highest(self.directory)
        path = self.directory / str(claim_number)
        info = _read(path)
        if "pid" not in info:
            return "another process"  # it has not written its claim yet
        try:
            age = max(0.0, time.time() - path.stat().st_mtime)
        except OSError:
            return owners.describe(info)  # released just now
        return f"{owners.describe(info)}, last heartbeat {age:.0f} s ago"

    def _claim(self, claim_number: int) -> bool:
        path = self.directory / str(claim_number)
        self.directory.mkdir(parents=True, exist_ok=True)
        try:
            _write(path, json.dumps(owners.this_process(self._pace.host)))
        except FileExistsError:
            return False
        # If the directory was read long ago, this number may have been used and removed since.
        if _highest(self.directory) != (claim_number, False):
            path.unlink(missing_ok=True)
            return False
        self._number = claim_number
        _remove_below(self.directory, claim_number)
        self._done = threading.Event()
        threading.Thread(
            target=_send_heartbeats, args=(path, self._done, self._pace, self._on_lost), daemon=True
        ).start()
        return True

    def _is_expired(self, claim_number: int) -> bool:
        path = self.directory / str(claim_number)
        try:
            # Open the file: NFS fetches a fresh modification time only when a file is opened.
            with open(path, "rb") as file:
                heartbeat = claim_number, os.fstat(file.fileno()).st_mtime_ns
        except FileNotFoundError:  # released or taken over just now; poll again
            return False
        if owners.is_dead(_read(path), self._pace.host):
            return True
        now = time.monotonic()
        if heartbeat != self._seen:
            self._seen, self._since = heartbeat, now
        return now - self._since > self._pace.expiry_seconds


@contextmanager
def hold(lease: Lease, on_wait: Callable[[str], None] | None = None) -> Iterator[None]:
    """Hold a lease during the block, after waiting for it without a limit.

    Args:
        lease: the lease.
        on_wait: called once with a description of the current owner, if there is one.

    Raises:
        OSError: the lease cannot be created.
    """
    pause = _MIN_POLL_SECONDS
    while not lease.try_acquire():
        if on_wait is not None and pause > _MIN_POLL_SECONDS:
            on_wait(lease.owner())
            on_wait = None
        time.sleep(pause)
        pause = min(_MAX_POLL_SECONDS, 2 * pause)
    try:
        yield
    finally:
        lease.release()


def create_directory(directory: Path) -> list[Path]:
    """Create the directory of a lease; return it and its parents that are new, innermost first.

    Raises:
        OSError: it cannot be created.
    """
    created = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    return created


def remove_unused(created: Sequence[Path], lease: Lease) -> None:
    """Remove directories that were created for a lease, if they hold only it and it is released."""
    with suppress(OSError):  # another process owns the lease by now, or has removed it
        if created and list(created[0].iterdir()) == [lease.directory]:
            for free in lease.directory.glob(f"*{_FREE}"):
                free.unlink()
            lease.directory.rmdir()
            for directory in created:
                directory.rmdir()


def end_process(directory: Path, work: str) -> NoReturn:
    """End this process at once, because another one now owns the lease and writes the same files.

    Args:
        directory: directory of these files.
        work: what the other process does to them, for example "trains into".
    """
    print(
        f"error: this process sent no heartbeat for too long, and another process now {work} "
        f"{directory}; this one ends without saving",
        file=sys.stderr,
        flush=True,
    )
    os._exit(_LOST_STATUS)


def _highest(directory: Path) -> tuple[int, bool]:
    """Return the highest claim number and whether it is free; (0, True) if never claimed.

    A number is free if a file marks it free, even if an unmarked file with that number exists:
    a claimant with an outdated listing has just created the latter, and will remove it.
    """
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return 0, True
    highest = max((int(stem) for stem in map(_stem, names) if stem.isdecimal()), default=0)
    return highest, not highest or f"{highest}{_FREE}" in names


def _stem(name: str) -> str:
    return name.removesuffix(_FREE)


def _remove_below(directory: Path, claim_number: int) -> None:
    for name in os.listdir(directory):
        if _stem(name).isdecimal() and int(_stem(name)) < claim_number:
            with suppress(FileNotFoundError):
                (directory / name).unlink()


def _send_heartbeats(
    path: Path, is_released: threading.Event, pace: LeaseTiming, on_lost: Callable[[], None]
) -> None:
    """Send heartbeats, by updating the file's modification time, until `is_released` is set."""
    while not is_released.wait(pace.heartbeat_seconds):
        try:
            os.utime(path)
        except FileNotFoundError:
            if _highest(path.parent)[0] > int(path.name) and not is_released.is_set():
                on_lost()
                return
        except OSError:
            continue  # the server is unreachable; at worst the lease expires


def _write(path: Path, text: str) -> None:
    """Create a new file with this text; remove it if writing fails."""
    with open(path, "x") as file:
        try:
            file.write(text)
            file.flush()
        except OSError:  # for example a full disk
            path.unlink(missing_ok=True)
            raise


def _read(path: Path) -> dict[str, object]:
    """Return the owner's description of itself; empty if it was killed before writing it."""
    try:
        info = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return info if isinstance(info, dict) else {}
