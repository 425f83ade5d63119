"""Locks: one process compiles a key while the others wait for its result."""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from graphtrain.cache.layout import Layout
from graphtrain.cache.programs import timestamp
from graphtrain.cache.writing import writing

if TYPE_CHECKING:
    from filelock import BaseFileLock


@contextmanager
def hold(
    layout: Layout, digest: str, on_wait: Callable[[str], None] | None = None
) -> Iterator[None]:
    """Hold the lock of a digest, after waiting for it as long as it takes.

    The kernel frees the lock when its owner dies, however it dies. Lock files stay: removing one
    while another process opens it could give the lock to both.

    Args:
        layout: the store's.
        digest: of a request or a program.
        on_wait: called once with a description of the owner, if there is one to wait for.

    Raises:
        CacheError: the lock file cannot be made.
    """
    lock = _lock(layout, digest)
    if not _try_acquire(lock):
        if on_wait is not None:
            on_wait(_describe_owner(layout, digest))
        lock.acquire()
    try:
        _write_owner(layout, digest)
        yield
    finally:
        with suppress(OSError):
            layout.owner(digest).unlink()
        lock.release()


@contextmanager
def hold_all_free(layout: Layout, digests: Iterable[str]) -> Iterator[bool]:
    """Hold the locks of digests and yield True, or yield False if another process has one."""
    with ExitStack() as held:
        for digest in digests:
            if not layout.lock(digest).exists():
                continue  # never locked, so not locked; a file for it would only stay behind
            lock = _lock(layout, digest)
            if not _try_acquire(lock):
                yield False
                return
            held.callback(lock.release)
        yield True


def _lock(layout: Layout, digest: str) -> "BaseFileLock":
    from filelock import FileLock  # takes 40 ms, which a warm start need not pay

    path = layout.lock(digest)
    with writing(path, 0):
        path.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(path)


def _try_acquire(lock: "BaseFileLock") -> bool:
    from filelock import Timeout

    with writing(Path(lock.lock_file), 0):
        try:
            lock.acquire(timeout=0)
        except Timeout:  # an OSError as well, so not for writing to see
            return False
    return True


def _write_owner(layout: Layout, digest: str) -> None:
    owner = {"pid": os.getpid(), "host": os.uname().nodename, "since": timestamp()}
    with suppress(OSError):  # only messages read it
        layout.owner(digest).write_text(json.dumps(owner))


def _describe_owner(layout: Layout, digest: str) -> str:
    try:
        owner = json.loads(layout.owner(digest).read_text())
        return f"process {owner['pid']} on {owner['host']}, since {owner['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"  # which has not written its name yet
