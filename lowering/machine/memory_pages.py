"""Memory pages of a CPU run: prefault them before the first step, merge them into huge pages."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from pathlib import Path
from typing import Any

from lowering.machine import host

_HUGEPAGE, _COLLAPSE = 14, 25  # madvise advice; since Linux 2.6.38 and 6.1
_MADVISE_BYTES = 16 << 20  # bytes per madvise call; other threads can map memory between two calls
_MEMSET_BYTES = 64 << 20  # bytes per memset call, about 0.03 s; Python runs between two calls
_HUGE = 2 << 20  # bytes of a huge page
_MAPS = Path("/proc/self/maps")
_NODES = Path("/sys/devices/system/node/online")


class MemoryPrefault:
    """Background thread that prefaults memory while Python imports modules, until stopped.

    Otherwise init and the first step on a CPU fault their pages in as they write, when every core
    computes; imports use one core. Pages are written, not requested with madvise(2), because
    madvise holds a lock that each mmap(2) of an import waits for, and is no faster. Once stopped,
    the memory is free for any allocation. The thread therefore starts only in a process that
    retains freed memory (host.retain_freed_memory, glibc only).
    """

    def __init__(self, size: int) -> None:
        """Start the thread; size is in bytes."""
        self._given, self._stopped = 0, False
        self._thread = threading.Thread(target=self._give, args=(size,), daemon=True)
        if size and host.retains_freed_memory() and host.usable_cores() > 1 and _has_one_node():
            self._thread.start()

    def stop(self) -> int:
        """Stop the thread; return the number of bytes prefaulted."""
        self._stopped = True
        if self._thread.ident is not None:
            self._thread.join()
        return self._given

    def _give(self, size: int) -> None:
        library = _library()
        place = library.malloc(size)
        while place and not self._stopped and self._given < size:
            piece = min(_MEMSET_BYTES, size - self._given)
            library.memset(place + self._given, 0, piece)
            self._given += piece
        library.free(place)


def use_huge_pages() -> threading.Thread | None:
    """Merge the pages of this process's heap into huge pages, in a background thread.

    A step reads gigabytes once and spends a tenth of its time on TLB misses of 4 kB pages. Call
    this after the first step has allocated its memory, which the process retains
    (host.retain_freed_memory). Earlier, the start would wait for contiguous memory.

    Returns:
        The thread; None if there is no glibc heap or freed memory is not retained.

    Source: madvise(2)
    """
    with contextlib.suppress(OSError, AttributeError):
        heap = [line for line in _MAPS.read_text().splitlines() if line.endswith("[heap]")]
        if heap and host.retains_freed_memory():
            begin = int(heap[0].split("-")[0], 16)
            end = int(heap[-1].split()[0].split("-")[1], 16)
            thread = threading.Thread(target=_merge, args=(_library(), begin, end), daemon=True)
            thread.start()
            return thread
    return None


def _merge(library: Any, begin: int, end: int) -> None:
    begin = -(-begin // _HUGE) * _HUGE
    for place in range(
        begin, end - _HUGE + 1, _MADVISE_BYTES
    ):  # the process can exit between two calls
        size = min(_MADVISE_BYTES, (end - place) // _HUGE * _HUGE)
        if library.madvise(place, size, _HUGEPAGE) == 0:
            library.madvise(place, size, _COLLAPSE)


def _library() -> Any:
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    library.malloc.argtypes = [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    library.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library


def _has_one_node() -> bool:
    """Return whether there is one NUMA node; with several, the first writer should place a page."""
    try:
        return _NODES.read_text().strip() == "0"
    except OSError:
        return True
