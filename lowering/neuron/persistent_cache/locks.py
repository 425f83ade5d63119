"""Locks of entries: a file beside a program says that somebody compiles it.

AWS's tools make an empty file and remove it at the end. A killed one's stays, and who needs the
entry waits for it without end. Ours says who made it, is locked in the kernel while its maker
lives, and is touched every minute for other hosts to see.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lowering.errors import LoweringError

SUFFIX = ".lock"
TEMPORARY = ".graphtrain-"  # how every file begins that a killed process of ours may leave
_GUARD = "graphtrain.lock"  # in the root: one process at a time takes or removes locks
_SILENCE = 600  # seconds without a touch after which the maker on another host counts as dead


@dataclass(frozen=True)
class Lock:
    """A lock as it was found."""

    path: Path
    is_live: bool
    owner: str  # for messages


@dataclass(frozen=True)
class Held:
    """A lock of this process."""

    path: Path
    descriptor: int

    def touch(self) -> None:
        """Say to other hosts that its owner lives."""
        with suppress(OSError):
            os.utime(self.descriptor)

    def release(self) -> None:
        """Give it back, unless somebody has removed it by force and it is another's now."""
        with suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self.path), os.fstat(self.descriptor)):
                os.unlink(self.path)
        os.close(self.descriptor)


class Judge:
    """Tells the locks of the living from those of the dead, as of the moment it is made.

    Nothing in a lock of AWS's tools tells who made it. It is live while a compiler on this machine
    has the entry's name on its command line, and until it is stale_after seconds old: a compiler on
    another machine or in another container cannot be seen.
    """

    def __init__(self, stale_after: float) -> None:
        self._stale_after = stale_after

    def of(self, path: Path) -> Lock | None:
        """What a lock is worth; None where there is none."""
        try:
            age = time.time() - path.stat().st_mtime
            owner = _owner(path)
        except FileNotFoundError:
            return None
        if owner is not None:
            return _ours(path, owner, age)
        if path.parent.name in self._compilations:
            return Lock(path, True, "a neuronx-cc that runs here")
        return Lock(path, age < self._stale_after, f"another tool, {age / 60:.0f} minutes ago")

    @cached_property
    def _compilations(self) -> str:
        """The command lines of all compilers on this machine."""
        lines = []
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):  # it ended, or is another user's secret
                line = file.read_bytes().decode(errors="replace")
                lines += [line] if "neuronx-cc" in line else []
        return "\n".join(lines)


def take(path: Path, root: Path, judge: Judge) -> Held | Lock:
    """Make a lock, in place of a stale one; or return that of somebody who lives.

    Raises:
        LoweringError: the directory cannot be written.
    """
    with _guard(root):
        found = judge.of(path)
        if found is not None and found.is_live:
            return found
        path.unlink(missing_ok=True)
        return _make(path) or Lock(path, True, "another tool, just now")


def clear(locks: list[Lock], root: Path, judge: Judge, *, force: bool) -> list[Lock]:
    """Remove those that are stale still, or all by force; return the removed.

    Raises:
        LoweringError: the directory cannot be written.
    """
    removed = []
    with _guard(root):
        for lock in locks:
            now = judge.of(lock.path)
            if now is not None and (force or not now.is_live):
                lock.path.unlink(missing_ok=True)
                removed.append(now)
    return removed


def _make(path: Path) -> Held | None:
    """A lock whose content and kernel lock are there as soon as its name is; None if it is taken.

    Were it first made and then written, one killed in between would leave an empty file, as
    AWS's tools do, which would stop everyone for hours.
    """
    temporary = path.with_name(f"{TEMPORARY}{os.uname().nodename}-{os.getpid()}-lock")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644)
    with suppress(OSError):  # some network file systems have none; the touches remain
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    about = {"tool": "graphtrain", "host": os.uname().nodename, "pid": os.getpid()}
    os.write(descriptor, json.dumps(about).encode())
    try:
        os.link(temporary, path)
    except FileExistsError:
        os.close(descriptor)
        return None
    finally:
        temporary.unlink()
    return Held(path, descriptor)


def _owner(path: Path) -> dict | None:
    """Who made it, if we did."""
    try:
        owner = json.loads(path.read_bytes())
        return owner if owner["tool"] == "graphtrain" else None
    except (ValueError, KeyError, TypeError, PermissionError):
        return None


def _ours(path: Path, owner: dict, age: float) -> Lock:
    name = f"graphtrain, process {owner['pid']} on {owner['host']}"
    held = _is_held(path)
    if held is None or (not held and owner["host"] != os.uname().nodename):
        held = age < _SILENCE
    return Lock(path, held, name)


def _is_held(path: Path) -> bool | None:
    """Whether a process that lives holds it in the kernel; None where that cannot be asked."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return False


@contextmanager
def _guard(root: Path) -> Iterator[None]:
    """One process at a time; the kernel lets the next in when one dies."""
    from filelock import FileLock

    try:
        with FileLock(root / _GUARD):
            yield
    except OSError as error:
        raise LoweringError(f"cannot lock entries of {root}: {error.strerror}") from None
