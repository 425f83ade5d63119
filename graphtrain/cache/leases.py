"""Leases: one process compiles a key while others, on any host, do something else or wait.

The lease of a digest is a directory with a numbered file for each claim. The highest number has the
lease until its owner renames the file to say that it is free, or until the owner is over: dead, as
the kernel of the same host tells, or without a sign of life for a while by the waiter's own clock,
so hosts need not agree on the time. A claim makes the next number, which only one can (O_EXCL, on
NFS too), and the highest file is never removed, so nobody acts on what another has undone. The
system's file locks are not used: they do not reach across hosts everywhere.

An owner that was only paused, and wakes up after it was taken to be over, stores its program all
the same; entries are keyed by content and appear whole, so that does no harm.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from graphtrain.cache.layout import Layout
from graphtrain.cache.programs import timestamp
from graphtrain.cache.writing import writing

_FREE = ".free"
_SHORTEST, _LONGEST = 0.005, 0.5  # seconds between looks at a lease that another has


@dataclass(frozen=True)
class Pace:
    """How often an owner gives a sign of life, and how long none may be missing."""

    beat: float = 5.0  # seconds
    expiry: float = 45.0  # seconds
    host: str | None = None  # what tells this host from others; the kernel knows


PACE = Pace()


class Lease:
    """The lease of one digest, as one claimant sees it."""

    def __init__(self, directory: Path, pace: Pace) -> None:
        self._directory = directory
        self._pace = pace
        self._number: int | None = None  # of the claim that has it
        self._seen: tuple[int, int] | None = None  # the other's number and last sign of life
        self._since = 0.0  # when it was first seen, by this process's clock
        self._done = threading.Event()

    def try_acquire(self) -> bool:
        """Claim it, if it is free or its owner is over; whether this claimant has it now.

        Raises:
            CacheError: the lease cannot be made.
        """
        if self._number is not None:
            return True
        with writing(self._directory, 0):
            highest, is_free = _highest(self._directory)
            if not is_free and not self._is_over(highest):
                return False
            return self._claim(highest + 1)

    def release(self) -> None:
        """Let go of it."""
        if self._number is None:
            return
        self._done.set()
        path = self._directory / str(self._number)
        self._number = None
        with suppress(OSError):  # gone, where another took it to be over
            path.rename(path.with_name(path.name + _FREE))

    def owner(self) -> str:
        """Who has it, in words."""
        number, _ = _highest(self._directory)
        about = _read(self._directory / str(number))
        if "pid" not in about:
            return "another process"  # which has not written its name yet
        return f"process {about.get('pid')} on {about.get('host')}, since {about.get('since')}"

    def _claim(self, number: int) -> bool:
        path = self._directory / str(number)
        self._directory.mkdir(parents=True, exist_ok=True)
        about = {
            "pid": os.getpid(),
            "host": os.uname().nodename,
            "boot": self._pace.host or _boot(),
            "since": timestamp(),
        }
        try:
            _write(path, json.dumps(about))
        except FileExistsError:
            return False
        # This claimant may have looked long ago, and the number be one that was used and removed.
        if _highest(self._directory) != (number, False):
            path.unlink(missing_ok=True)
            return False
        self._number = number
        _remove_below(self._directory, number)
        self._done = threading.Event()
        threading.Thread(target=_beat, args=(path, self._done, self._pace), daemon=True).start()
        return True

    def _is_over(self, number: int) -> bool:
        path = self._directory / str(number)
        try:
            # Opened, since NFS asks the server for the time of an opened file only.
            with open(path, "rb") as file:
                seen = number, os.fstat(file.fileno()).st_mtime_ns
        except FileNotFoundError:  # let go or taken over just now; look again
            return False
        if _is_dead(_read(path), self._pace.host):
            return True
        now = time.monotonic()
        if seen != self._seen:
            self._seen, self._since = seen, now
        return now - self._since > self._pace.expiry


@contextmanager
def hold(
    layout: Layout, digest: str, on_wait: Callable[[str], None] | None, pace: Pace
) -> Iterator[None]:
    """Hold the lease of a digest, after waiting for it as long as it takes.

    Args:
        layout: the store's.
        digest: of a request or a program.
        on_wait: called once with a description of the owner, if there is one to wait for.

    Raises:
        CacheError: the lease cannot be made.
    """
    lease, pause = Lease(layout.lease(digest), pace), _SHORTEST
    while not lease.try_acquire():
        if on_wait is not None and pause > _SHORTEST:
            on_wait(lease.owner())
            on_wait = None
        time.sleep(pause)
        pause = min(_LONGEST, 2 * pause)
    try:
        yield
    finally:
        lease.release()


@contextmanager
def hold_all_free(layout: Layout, digests: Iterable[str], pace: Pace) -> Iterator[bool]:
    """Hold the leases of digests and yield True, or yield False if another process has one."""
    with ExitStack() as held:
        for digest in digests:
            directory = layout.lease(digest)
            if not directory.exists():
                continue  # never claimed; a directory for it would only stay behind
            lease = Lease(directory, pace)
            if not lease.try_acquire():
                yield False
                return
            held.callback(lease.release)
        yield True


def _highest(directory: Path) -> tuple[int, bool]:
    """The highest number, and whether it is free; (0, True) where nobody ever claimed.

    A number is free if a file says so, even beside one that does not: a claimant that looked long
    ago has just made that one, and removes it when it looks again.
    """
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return 0, True
    highest = max((int(stem) for stem in map(_stem, names) if stem.isdecimal()), default=0)
    return highest, not highest or f"{highest}{_FREE}" in names


def _stem(name: str) -> str:
    return name.removesuffix(_FREE)


def _remove_below(directory: Path, number: int) -> None:
    for name in os.listdir(directory):
        if _stem(name).isdecimal() and int(_stem(name)) < number:
            with suppress(FileNotFoundError):
                (directory / name).unlink()


def _beat(path: Path, done: threading.Event, pace: Pace) -> None:
    """Give signs of life until done."""
    while not done.wait(pace.beat):
        with suppress(OSError):  # taken over, or the server is away; then it expires, at worst
            os.utime(path)


def _write(path: Path, text: str) -> None:
    """Make a new file with a text, or none."""
    with open(path, "x") as file:
        try:
            file.write(text)
            file.flush()
        except OSError:  # a full disk
            path.unlink(missing_ok=True)
            raise


def _read(path: Path) -> dict[str, object]:
    """What an owner wrote about itself; nothing where it was killed before that."""
    try:
        about = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return about if isinstance(about, dict) else {}


def _is_dead(owner: dict[str, object], host: str | None) -> bool:
    """Whether the owner was a process of this kernel that is there no more."""
    pid = owner.get("pid")
    if owner.get("boot") != (host or _boot()) or not isinstance(pid, int):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False  # another user's
    return _is_zombie(pid)


def _is_zombie(pid: int) -> bool:
    """Whether a process has ended and its parent has not yet been told."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1] in ("Z", "X")
    except OSError:
        return False


@cache
def _boot() -> str:
    """What tells processes of this host and container from those of others.

    Numbers of processes mean the same only where the kernel, since it began, and its table of
    processes are the same.
    """
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{kernel} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return os.uname().nodename
