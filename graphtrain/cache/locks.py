"""Leases: one process compiles a key while others, on any host, wait for its result.

A lease is a file that only one can put in its place (by link, which NFS does atomically) and whose
owner writes a growing count into it. Who waits takes it over once the owner is dead, as the kernel
of the same host tells, or once the count has not changed for a while, by the waiter's own clock:
hosts need not agree on the time. No lock of the file system is used.

An owner that was only paused, and wakes up after that, stores its program all the same; entries are
keyed by content and appear whole, so that does no harm.
"""

import hashlib
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

_LEASE = "lease"
_SHORTEST, _LONGEST = 0.005, 0.5  # seconds between looks at a lease that another has


@dataclass(frozen=True)
class Pace:
    """How often an owner gives a sign of life, and how long none may be missing."""

    beat: float = 5.0  # seconds
    expiry: float = 45.0  # seconds
    host: str | None = None  # what tells this host from others; the kernel knows


@contextmanager
def hold(
    layout: Layout, digest: str, on_wait: Callable[[str], None] | None = None, pace: Pace = Pace()
) -> Iterator[None]:
    """Hold the lease of a digest, after waiting for it as long as it takes.

    Args:
        layout: the store's.
        digest: of a request or a program.
        on_wait: called once with a description of the owner, if there is one to wait for.

    Raises:
        CacheError: the lease cannot be made.
    """
    path = layout.lock(digest)
    lease, watch, pause = _claim(path, pace), _Watch(pace), _SHORTEST
    while lease is None:
        owner = _read(path / _LEASE)
        if owner is not None and watch.is_over(owner):
            _take_over(path, owner)
        elif owner is not None:
            if on_wait is not None:
                on_wait(_description(owner))
                on_wait = None
            time.sleep(pause)
            pause = min(_LONGEST, 2 * pause)
        lease = _claim(path, pace)
    try:
        yield
    finally:
        lease.release()


@contextmanager
def hold_all_free(layout: Layout, digests: Iterable[str]) -> Iterator[bool]:
    """Hold the leases of digests and yield True, or yield False if a living process has one."""
    with ExitStack() as held:
        for digest in digests:
            path = layout.lock(digest)
            if not path.exists():
                continue  # never held, or let go; a directory for it would only stay behind
            lease = _claim(path, Pace())
            owner = _read(path / _LEASE) if lease is None else None
            if owner is not None and _is_dead(owner):
                _take_over(path, owner)
                lease = _claim(path, Pace())
            if lease is None:
                yield False
                return
            held.callback(lease.release)
        yield True


class _Lease:
    """One that this process has; a thread counts in it until it is released."""

    def __init__(self, path: Path, descriptor: int, about: dict[str, object], pace: Pace) -> None:
        self._path, self._descriptor, self._about = path, descriptor, about
        self._write(0)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._count, args=(pace.beat,), daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Let go of it, unless another has taken it over."""
        self._done.set()
        self._thread.join()
        os.close(self._descriptor)
        owner = _read(self._path)
        if owner is not None and owner.get("name") == self._about["name"]:
            with suppress(OSError):
                self._path.unlink()
                self._path.parent.rmdir()

    def _count(self, beat: float) -> None:
        count = 0
        while not self._done.wait(beat):
            count += 1
            with suppress(OSError):  # a full disk; then it expires, at worst
                self._write(count)

    def _write(self, count: int) -> None:
        text = json.dumps(self._about | {"count": count}).encode()
        os.pwrite(self._descriptor, text, 0)  # never shorter than before, as counts only grow


class _Watch:
    """What a waiter has seen of a lease, by its own clock."""

    def __init__(self, pace: Pace) -> None:
        self._pace, self._seen, self._since = pace, None, 0.0

    def is_over(self, owner: dict) -> bool:
        """Whether the owner is dead, or has given no sign of life for long."""
        if _is_dead(owner, self._pace.host):
            return True
        now = time.monotonic()
        if owner != self._seen:
            self._seen, self._since = owner, now
        return now - self._since > self._pace.expiry


def _claim(path: Path, pace: Pace) -> _Lease | None:
    """The lease, if nobody has it."""
    about = {
        "name": os.urandom(8).hex(),
        "pid": os.getpid(),
        "host": os.uname().nodename,
        "boot": pace.host or _boot(),
        "since": timestamp(),
    }
    if (path / _LEASE).exists():
        return None
    with writing(path, 0):
        draft = path / f"new-{about['name']}"
        descriptor = _make(draft)
        try:
            lease = _Lease(path / _LEASE, descriptor, about, pace)
            if _put_in_place(draft, path / _LEASE, descriptor):
                return lease
            lease.release()
        finally:
            with suppress(FileNotFoundError):
                draft.unlink()
    return None


def _make(path: Path) -> int:
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # its last owner removed the directory just now
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)


def _put_in_place(draft: Path, lease: Path, descriptor: int) -> bool:
    try:
        os.link(draft, lease)
    except FileExistsError:
        # A server's answer can be lost and the question asked again: two names mean it was done.
        return os.fstat(descriptor).st_nlink == 2
    return True


def _take_over(path: Path, owner: dict) -> None:
    """Move a lease that is over out of the way; of many waiters one does it.

    The marker is named after that very lease, so who comes late finds it made and moves nothing.
    """
    name = owner["name"]
    moved = path / f"was-{name}"
    with suppress(FileExistsError, FileNotFoundError):
        os.close(os.open(path / f"over-{name}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
        if _read(path / _LEASE) != owner:
            return
        (path / _LEASE).rename(moved)
        if (_read(moved) or {}).get("name") != name:  # another's, which came in between
            os.link(moved, path / _LEASE)
    with suppress(FileNotFoundError):
        moved.unlink()


def _read(path: Path) -> dict | None:
    """What an owner wrote; None where there is no lease."""
    try:
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        text = b""
    try:
        owner = json.loads(text)
        return {"name": str(owner["name"]), **owner}
    except (ValueError, KeyError, TypeError):
        return {"name": hashlib.sha256(text).hexdigest()[:16]}  # damaged, but one of a kind


def _is_dead(owner: dict, host: str | None = None) -> bool:
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
    """What tells processes of this host and container from those of others: numbers of processes
    mean the same only where the kernel, since it began, and its table of processes are the same."""
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{kernel} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return os.uname().nodename


def _description(owner: dict) -> str:
    if "pid" not in owner:
        return "another process"
    return f"process {owner.get('pid')} on {owner.get('host')}, since {owner.get('since')}"
