"""Pages of memory: from the kernel before they are needed, and huge once a step has run."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from pathlib import Path
from typing import Any

from lowering.machine import host

_HUGEPAGE, _COLLAPSE = 14, 25  # advice; since Linux 2.6.38 and 6.1
_PIECE = 16 << 20  # bytes that are asked for at once; others ask for memory in between
_WRITTEN = 64 << 20  # bytes that are written at once, about 0.03 s; Python takes turns in between
_HUGE = 2 << 20  # bytes of a huge page
_MAPS = Path("/proc/self/maps")
_NODES = Path("/sys/devices/system/node/online")


class PagesAhead:
    """Takes this process's memory from the kernel while Python imports, until it is stopped.

    init and the first step of a CPU otherwise take theirs page by page as they write, when every
    core computes; Python imports on one. The memory is written, not asked for with madvise(2): that
    holds a lock for which every mmap(2) of an import waits, and gains nothing. When this stops the
    memory is free, for whoever allocates; so it begins only in a process that keeps what it frees
    (host.keep_pages), where the C library is glibc.
    """

    def __init__(self, size: int) -> None:
        """Begin; size is in bytes."""
        self._given, self._stopped = 0, False
        self._thread = threading.Thread(target=self._give, args=(size,), daemon=True)
        if size and host.keeps_pages() and host.usable_cores() > 1 and _has_one_node():
            self._thread.start()

    def stop(self) -> int:
        """End it; how many bytes there are now."""
        self._stopped = True
        if self._thread.ident is not None:
            self._thread.join()
        return self._given

    def _give(self, size: int) -> None:
        library = _library()
        place = library.malloc(size)
        while place and not self._stopped and self._given < size:
            piece = min(_WRITTEN, size - self._given)
            library.memset(place + self._given, 0, piece)
            self._given += piece
        library.free(place)


def merge_pages() -> threading.Thread | None:
    """Have the kernel make huge pages of this process's heap, while others go on computing.

    A step reads gigabytes once, and a tenth of its time goes to finding pages of 4 kB. To be called
    when a step has taken its memory, which stays (host.keep_pages); asked for before, huge pages
    would make the start wait for memory that lies together.

    Returns:
        The thread that does it; None where there is no heap of glibc, or it is not kept.

    Source: madvise(2)
    """
    with contextlib.suppress(OSError, AttributeError):
        heap = [line for line in _MAPS.read_text().splitlines() if line.endswith("[heap]")]
        if heap and host.keeps_pages():
            begin = int(heap[0].split("-")[0], 16)
            end = int(heap[-1].split()[0].split("-")[1], 16)
            thread = threading.Thread(target=_merge, args=(_library(), begin, end), daemon=True)
            thread.start()
            return thread
    return None


def _merge(library: Any, begin: int, end: int) -> None:
    begin = -(-begin // _HUGE) * _HUGE
    for place in range(begin, end - _HUGE + 1, _PIECE):  # the process may end between two
        size = min(_PIECE, (end - place) // _HUGE * _HUGE)
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
    """Whether all memory is equally near; else pages should be near those who write them first."""
    try:
        return _NODES.read_text().strip() == "0"
    except OSError:
        return True
