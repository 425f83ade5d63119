"""Huge pages of memory, once a step has run."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from pathlib import Path
from typing import Any

from lowering import host

_HUGEPAGE, _COLLAPSE = 14, 25  # advice; since Linux 2.6.38 and 6.1
_PIECE = 16 << 20  # bytes that are asked for at once; others ask for memory in between
_HUGE = 2 << 20  # bytes of a huge page
_MAPS = Path("/proc/self/maps")


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
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library
