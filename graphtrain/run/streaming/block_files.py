"""Blocks of one file in a directory of the cache, at most so many bytes of them.

Several processes may share the directory. A block appears complete under its name, and each one is
verified whenever it is read, so neither a kill nor damage to the disk can change a token.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import shutil
import threading
import time
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from graphtrain.data.indexed.blocks import block_digest

_IN_MEMORY_BYTES = 256 << 20  # of blocks that cannot be written, as on a full disk
_ABANDONED_SECONDS = 3600.0  # without a change, after which nobody still writes a file
_TOUCH_SECONDS = 60.0  # between two notes that the blocks are read


class BlockFiles:
    """Verified blocks by their number; the least recently used are removed.

    Args:
        directory: Directory of the blocks, which need not exist.
        digests: Digest of each block.
        most: Number of blocks to keep on disk.
        in_memory: Number of blocks to keep in memory where they cannot be written.
    """

    def __init__(
        self, directory: Path, digests: Sequence[bytes], most: int, in_memory: int
    ) -> None:
        self._directory, self._digests = directory, digests
        self._most, self._most_in_memory = most, in_memory
        self._memory: OrderedDict[int, bytes] = OrderedDict()
        self._lock = threading.Lock()
        self._has_warned = False
        self._touched = -math.inf
        self._hold()
        self._stored = OrderedDict.fromkeys(self._found())
        self._remove_oldest()

    def has(self, block: int) -> bool:
        """Return whether a block is here, as far as this process knows."""
        return block in self._stored or block in self._memory

    def read(self, block: int) -> bytes | None:
        """Return a block; None if it is not here, or damaged."""
        with self._lock:
            if (data := self._memory.get(block)) is not None:
                self._memory.move_to_end(block)
                return data
        self._touch()
        try:
            data = self._path(block).read_bytes()
        except OSError:  # also if another process has removed it
            self._forget(block)
            return None
        if block_digest(data) != self._digests[block]:
            self._remove(block)
            self._forget(block)
            return None
        with self._lock:
            self._stored[block] = None
            self._stored.move_to_end(block)
        return data

    def keep(self, block: int, data: bytes) -> None:
        """Write a verified block; keep it in memory if it cannot be written."""
        path = self._path(block)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(data)
            temporary.replace(path)
        except OSError as error:
            self._keep_in_memory(block, data, error, temporary)
            return
        with self._lock:
            self._stored[block] = None
            self._stored.move_to_end(block)
        self._remove_oldest()

    def _keep_in_memory(self, block: int, data: bytes, error: OSError, temporary: Path) -> None:
        with suppress(OSError):  # of the same disk
            temporary.unlink(missing_ok=True)
        with self._lock:
            self._memory[block] = data
            while len(self._memory) > self._most_in_memory:
                self._memory.popitem(last=False)
            is_first, self._has_warned = not self._has_warned, True
        if is_first:
            warnings.warn(
                f"{self._directory}: {error.strerror}; blocks of the data are kept in memory, and "
                "fetched again more often; free space, or set run.data.stream.cache or cache_mb",
                stacklevel=1,
            )

    def _hold(self) -> None:
        """Keep other processes from removing the directory while this one may read it."""
        with suppress(OSError):  # of a disk that is read-only, or without locks
            self._directory.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._directory, os.O_RDONLY)
            weakref.finalize(self, os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def _touch(self) -> None:
        """Note in the directory that it is read, for hosts that see it and not the lock."""
        if time.monotonic() > self._touched + _TOUCH_SECONDS:
            self._touched = time.monotonic()
            with suppress(OSError):
                os.utime(self._directory)

    def _found(self) -> list[int]:
        """Return the blocks that are there, the oldest first."""
        found = []
        try:
            entries = list(os.scandir(self._directory))
        except OSError:
            return []
        remove_abandoned(Path(entry) for entry in entries if entry.name.startswith("."))
        for entry in entries:
            with suppress(OSError):  # another process has removed it
                if entry.name.isdigit() and int(entry.name) < len(self._digests):
                    found.append((entry.stat().st_mtime, int(entry.name)))
        return [block for _, block in sorted(found)]

    def _remove_oldest(self) -> None:
        with self._lock:
            surplus = max(0, len(self._stored) - self._most)
            oldest = [self._stored.popitem(last=False)[0] for _ in range(surplus)]
        for block in oldest:
            self._remove(block)

    def _remove(self, block: int) -> None:
        with suppress(OSError):  # another process has removed it, or the disk is read-only now
            self._path(block).unlink()

    def _forget(self, block: int) -> None:
        with self._lock:
            self._stored.pop(block, None)

    def _path(self, block: int) -> Path:
        return self._directory / str(block)


def remove_abandoned(temporary: Iterable[Path]) -> None:
    """Delete files of processes that were killed before they had written and renamed them."""
    for path in temporary:
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
                path.unlink()


def remove_replaced(directory: Path) -> None:
    """Delete blocks of the datasets that were in the store before this one, beside its directory.

    Not while a process reads them, whose run may need them to its end. Where it is on another host,
    and the file system has no locks: not for an hour after it has read or written one.
    """
    with suppress(OSError):
        for other in directory.parent.iterdir():
            is_abandoned = time.time() - other.stat().st_mtime > _ABANDONED_SECONDS
            if other.name != directory.name and is_abandoned:
                _remove_unless_read(other)


def _remove_unless_read(directory: Path) -> None:
    """Delete a directory of blocks that no process of this host holds."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        if _is_free(descriptor):
            shutil.rmtree(directory, ignore_errors=True)
    finally:
        os.close(descriptor)


def _is_free(descriptor: int) -> bool:
    """Lock a directory; return whether no other process holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)  # the file system has no locks
    return True


def in_memory_blocks(block_bytes: int) -> int:
    """Return the number of blocks that are kept in memory where they cannot be written."""
    return max(1, _IN_MEMORY_BYTES // block_bytes)
