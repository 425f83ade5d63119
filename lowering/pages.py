"""Memory from the kernel in huge pages, before it is needed, where the C library is glibc."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from pathlib import Path

from lowering import host

_HUGEPAGE = 14  # MADV_HUGEPAGE, which mmap has only where Python was built with it
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14; mmap has no name for it
_HUGE = 2 << 20  # bytes of a huge page
_PIECE = 16 << 20  # bytes that are asked for at once; others ask for memory in between
_NODES = Path("/sys/devices/system/node/online")


class PagesAhead:
    """Has the kernel give this process huge pages while Python imports, until it is stopped.

    Otherwise init and the first step of a CPU take theirs one by one as they write: 0.3 processor
    seconds of a 32M Llama's start, instead of 0.2 on a core that is idle. Every later step reads
    gigabytes once, and a tenth of its time goes to finding pages of 4 kB. The memory is free all
    the time, and whoever allocates takes it; so it begins only in a process that keeps what it
    frees (host.keep_pages). What is not given when it is stopped comes in huge pages all the same.

    Source: madvise(2)
    """

    def __init__(self, size: int) -> None:
        """Begin; size is in bytes."""
        self._given, self._stopped = 0, False
        self._thread = threading.Thread(target=self._give, args=(size,), daemon=True)
        if size and host.keeps_pages():
            self._thread.start()

    def stop(self) -> int:
        """End it; how many bytes there are now."""
        self._stopped = True
        if self._thread.ident is not None:
            self._thread.join()
        return self._given

    def _give(self, size: int) -> None:
        with contextlib.suppress(OSError, AttributeError):  # another system, another C library
            library = ctypes.CDLL(None)
            library.malloc.restype = ctypes.c_void_p
            library.malloc.argtypes = [ctypes.c_size_t]
            library.free.argtypes = [ctypes.c_void_p]
            library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
            size += 2 * _HUGE  # it need not begin or end with one
            if not (place := library.malloc(size)):
                return
            library.free(place)
            first, end = (at // _HUGE * _HUGE for at in (place + _HUGE - 1, place + size))
            library.madvise(first, end - first, _HUGEPAGE)
            here = _has_one_node()
            while here and not self._stopped and first + self._given + _PIECE <= end:
                if library.madvise(first + self._given, _PIECE, _POPULATE_WRITE):
                    return
                self._given += _PIECE


def _has_one_node() -> bool:
    """Whether all memory is equally near; else pages should be near those who write them first."""
    try:
        return _NODES.read_text().strip() == "0"
    except OSError:
        return True
