"""Leases: only one process compiles a key; others, on any host, wait or do other work.

The lease of a digest is a directory with a numbered file for each claim. The highest number owns
the lease until the owner renames its file to mark it free, or until the owner has expired: it is
dead according to the kernel of the same host, or has sent no heartbeat for a while by the waiter's
own clock, so host clocks need not agree. A claim creates the next number exclusively (O_EXCL, which
also works on NFS). The highest file is never removed, so no process acts on a state that another
has undone. File locks of the operating system are not used, because not every network file system
extends them across hosts.

An owner that was only paused, and resumes after its lease expired, still stores its program. That
is harmless, because entries are keyed by content and created atomically.
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

from graphtrain.cache.layout import StorePaths
from graphtrain.cache.programs import timestamp
from graphtrain.cache.writing import write_errors

_FREE = ".free"
_MIN_POLL_SECONDS, _MAX_POLL_SECONDS = (
    0.005,
    0.5,
)  # seconds between polls of a lease that another process owns


@dataclass(frozen=True)
class LeaseTiming:
    """Heartbeat interval of lease owners, and the silence after which a lease expires."""

    heartbeat_seconds: float = 5.0  # seconds between heartbeats
    expiry_seconds: float = 45.0  # seconds without a heartbeat
    host: str | None = None  # unique id of this host; None: ask the kernel


DEFAULT_TIMING = LeaseTiming()


class Lease:
    """Lease of one digest, from the point of view of one claimant."""

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
        self._directory = directory
        self._pace = pace
        self._on_lost = on_lost
        self._number: int | None = None  # of this claimant's claim, while it owns the lease
        self._seen: tuple[int, int] | None = None  # number and last heartbeat of the other owner
        self._since = 0.0  # time.monotonic() when that heartbeat was first seen
        self._done = threading.Event()

    def try_acquire(self) -> bool:
        """Claim the lease if it is free or expired; return whether this claimant owns it now.

        Raises:
            CacheError: the lease cannot be created.
        """
        if self._number is not None:
            return True
        with write_errors(self._directory, 0):
            highest, is_free = _highest(self._directory)
            if not is_free and not self._is_expired(highest):
                return False
            return self._claim(highest + 1)

    def acquire_unless_alive(self, on_wait: Callable[[str], None]) -> bool:
        """Claim the lease unless its owner is alive; return whether this claimant owns it now.

        The kernel knows whether an owner on this host is alive. An owner on another host, or in
        another container, is alive if it sends a heartbeat while this claimant waits.

        Args:
            on_wait: called with a description of the owner, before such a wait.

        Raises:
            CacheError: the lease cannot be created.
        """
        if self.try_acquire():
            return True
        claim_number, _ = _highest(self._directory)
        if _is_here(_read(self._directory / str(claim_number)), self._pace.host):
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
        path = self._directory / str(self._number)
        self._number = None
        with suppress(OSError):  # removed, if another claimant considered this one expired
            path.rename(path.with_name(path.name + _FREE))

    def owner(self) -> str:
        """Return a description of the current owner."""
        claim_number, _ = _highest(self._directory)
        path = self._directory / str(claim_number)
        info = _read(path)
        if "pid" not in info:
            return "another process"  # it has not written its claim yet
        owner = f"process {info.get('pid')} on {info.get('host')}, since {info.get('since')}"
        try:
            age = max(0.0, time.time() - path.stat().st_mtime)
        except OSError:
            return owner  # released just now
        return f"{owner}, last heartbeat {age:.0f} s ago"

    def _claim(self, claim_number: int) -> bool:
        path = self._directory / str(claim_number)
        self._directory.mkdir(parents=True, exist_ok=True)
        info = {
            "pid": os.getpid(),
            "host": os.uname().nodename,
            "boot": self._pace.host or _host_id(),
            "start": _start_time(os.getpid()),
            "since": timestamp(),
        }
        try:
            _write(path, json.dumps(info))
        except FileExistsError:
            return False
        # If the directory was read long ago, this number may have been used and removed since.
        if _highest(self._directory) != (claim_number, False):
            path.unlink(missing_ok=True)
            return False
        self._number = claim_number
        _remove_below(self._directory, claim_number)
        self._done = threading.Event()
        threading.Thread(
            target=_send_heartbeats, args=(path, self._done, self._pace, self._on_lost), daemon=True
        ).start()
        return True

    def _is_expired(self, claim_number: int) -> bool:
        path = self._directory / str(claim_number)
        try:
            # Open the file: NFS fetches a fresh modification time only when a file is opened.
            with open(path, "rb") as file:
                heartbeat = claim_number, os.fstat(file.fileno()).st_mtime_ns
        except FileNotFoundError:  # released or taken over just now; poll again
            return False
        if _is_dead(_read(path), self._pace.host):
            return True
        now = time.monotonic()
        if heartbeat != self._seen:
            self._seen, self._since = heartbeat, now
        return now - self._since > self._pace.expiry_seconds


@contextmanager
def hold_lease(
    layout: StorePaths, digest: str, on_wait: Callable[[str], None] | None, pace: LeaseTiming
) -> Iterator[None]:
    """Hold the lease of a digest during the block, after waiting for it without a limit.

    Args:
        layout: paths of the cache.
        digest: digest of a request or a program.
        on_wait: called once with a description of the current owner, if there is one.
        pace: heartbeat interval and expiry.

    Raises:
        CacheError: the lease cannot be created.
    """
    lease, pause = Lease(layout.lease(digest), pace), _MIN_POLL_SECONDS
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


@contextmanager
def try_hold_all(layout: StorePaths, digests: Iterable[str], pace: LeaseTiming) -> Iterator[bool]:
    """Hold the leases of all digests and yield True; yield False if another process owns one."""
    with ExitStack() as held_leases:
        for digest in digests:
            directory = layout.lease(digest)
            if not directory.exists():
                continue  # never claimed; do not create a directory that would be left over
            lease = Lease(directory, pace)
            if not lease.try_acquire():
                yield False
                return
            held_leases.callback(lease.release)
        yield True


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


def _is_here(owner: dict[str, object], host: str | None) -> bool:
    """Return whether the owner is or was a process of this host and container."""
    return owner.get("boot") == (host or _host_id()) and isinstance(owner.get("pid"), int)


def _is_dead(owner: dict[str, object], host: str | None) -> bool:
    """Return whether the owner was a process of this host and container that has ended."""
    pid = owner.get("pid")
    if not _is_here(owner, host) or not isinstance(pid, int):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass  # the process belongs to another user
    starts = {owner.get("start"), _start_time(pid)} - {None}
    return len(starts) == 2 or _is_zombie(pid)  # 2: the process id was given to another process


def _start_time(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None where there is no /proc."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def _is_zombie(pid: int) -> bool:
    """Return whether a process has ended but its parent has not collected its exit status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1] in ("Z", "X")
    except OSError:
        return False


@cache
def _host_id() -> str:
    """Return an id of this host, boot and container.

    Process ids are comparable only within one boot of a kernel and one PID namespace.
    """
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{kernel} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return os.uname().nodename
