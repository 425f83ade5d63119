"""Huge pages for the memory of a CPU run, which make its steps faster."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from pathlib import Path
from typing import Any

from lowering.machine import host

_HUGEPAGE, _COLLAPSE = 14, 25  # madvise advice; since Linux 2.6.38 and 6.1
_MADVISE_BYTES = 16 << 20  # bytes per madvise call; other threads can map memory between two calls
_HUGE = 2 << 20  # bytes of a huge page
_MAPS = Path("/proc/self/maps")


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
    for address in range(
        begin, end - _HUGE + 1, _MADVISE_BYTES
    ):  # the process can exit between two calls
        size = min(_MADVISE_BYTES, (end - address) // _HUGE * _HUGE)
        if library.madvise(address, size, _HUGEPAGE) == 0:
            library.madvise(address, size, _COLLAPSE)


def _library() -> Any:
    library = ctypes.CDLL(None)
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library
