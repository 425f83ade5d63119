"""Locks of cache entries: a file beside a program marks that a process is compiling it.

AWS's tools create an empty file and remove it at the end. If such a tool is killed, its lock
remains, and processes that need the entry wait forever. graphtrain creates the same file, because
AWS's tools wait for nothing else, and writes into it which process owns it, as leases do. It is
touched every minute so that other hosts see that the owner lives. File locks of the operating
system are not used, because not every network file system has them.
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lowering.errors import LoweringError
from lowering.machine import leases, owners
from lowering.machine.leases import Lease

SUFFIX = ".lock"
TEMPORARY = ".graphtrain-"  # prefix of every file that a killed graphtrain process may leave
_MUTEX = "graphtrain.lease"  # in the root: one process at a time creates or removes locks
_HEARTBEAT_TIMEOUT = (
    600  # seconds without a touch after which an owner on another host counts as dead
)


@dataclass(frozen=True)
class Lock:
    """State of a lock when it was read."""

    path: Path
    is_live: bool
    owner: str  # for messages


@dataclass(frozen=True)
class HeldLock:
    """A lock that this process holds."""

    path: Path
    descriptor: int

    def touch(self) -> None:
        """Show other hosts that the owner lives."""
        with suppress(OSError):
            os.utime(self.descriptor)

    def release(self) -> None:
        """Remove the lock, unless it was removed by force and another process has it now."""
        with suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self.path), os.fstat(self.descriptor)):
                os.unlink(self.path)
        os.close(self.descriptor)


class LockChecker:
    """Distinguishes live locks from stale ones, by the processes at the time of its creation.

    A lock of AWS's tools does not name its owner. It is live while a compiler on this machine has
    the entry's name on its command line, and otherwise until it is stale_after seconds old, since
    compilers on other machines and in other containers are not visible.
    """

    def __init__(self, stale_after: float) -> None:
        self._stale_after = stale_after

    def check(self, path: Path) -> Lock | None:
        """Return the state of a lock; None if the lock does not exist."""
        try:
            age = time.time() - path.stat().st_mtime
            owner = _owner(path)
        except FileNotFoundError:
            return None
        if owner is not None:
            return _graphtrain_lock(path, owner, age)
        if path.parent.name in self._compilations:
            return Lock(path, True, "a neuronx-cc on this machine")
        return Lock(path, age < self._stale_after, f"another tool, {age / 60:.0f} minutes ago")

    @cached_property
    def _compilations(self) -> str:
        """Command lines of all compilers that run on this machine."""
        lines = []
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):  # the process has ended, or belongs to another user
                line = file.read_bytes().decode(errors="replace")
                lines += [line] if "neuronx-cc" in line else []
        return "\n".join(lines)


def acquire(path: Path, root: Path, judge: LockChecker) -> HeldLock | Lock:
    """Acquire a lock, replacing a stale one; if another process holds it, return its state.

    Raises:
        LoweringError: the directory is not writable.
    """
    with _mutex(root):
        lock = judge.check(path)
        if lock is not None and lock.is_live:
            return lock
        path.unlink(missing_ok=True)
        return _create(path) or Lock(path, True, "another tool, just now")


def remove_stale(locks: list[Lock], root: Path, judge: LockChecker, *, force: bool) -> list[Lock]:
    """Remove the locks that are still stale, or all if `force`; return the removed ones.

    Raises:
        LoweringError: the directory is not writable.
    """
    removed = []
    with _mutex(root):
        for lock in locks:
            current = judge.check(lock.path)
            if current is not None and (force or not current.is_live):
                lock.path.unlink(missing_ok=True)
                removed.append(current)
    return removed


def _create(path: Path) -> HeldLock | None:
    """Create a lock with its content in one step; return None if one exists.

    If the file were created first and written later, a process killed in between would leave an
    empty file like one of AWS's tools, which would block all other processes for hours.
    """
    temporary = path.with_name(f"{TEMPORARY}{os.uname().nodename}-{os.getpid()}-lock")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644)
    owner = {"tool": "graphtrain"} | owners.this_process()
    os.write(descriptor, json.dumps(owner).encode())
    try:
        os.link(temporary, path)
    except FileExistsError:
        os.close(descriptor)
        return None
    finally:
        temporary.unlink()
    return HeldLock(path, descriptor)


def _owner(path: Path) -> dict | None:
    """Return the owner that a lock of graphtrain names; None for locks of other tools."""
    try:
        owner = json.loads(path.read_bytes())
        return owner if owner["tool"] == "graphtrain" else None
    except (ValueError, KeyError, TypeError, PermissionError):
        return None


def _graphtrain_lock(path: Path, owner: dict, age: float) -> Lock:
    is_live = not owners.is_dead(owner) if owners.is_here(owner) else age < _HEARTBEAT_TIMEOUT
    heartbeat = f"last heartbeat {max(0.0, age):.0f} s ago"
    return Lock(path, is_live, f"graphtrain, {owners.describe(owner)}, {heartbeat}")


@contextmanager
def _mutex(root: Path) -> Iterator[None]:
    """Exclude other processes of graphtrain, on any host, while locks are created or removed."""
    try:
        with leases.hold(Lease(root / _MUTEX)):
            yield
    except OSError as error:
        raise LoweringError(f"cannot lock entries of {root}: {error.strerror}") from None
