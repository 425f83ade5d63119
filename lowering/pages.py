"""Memory from the kernel before it is needed, by a thread, where the C library is glibc."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from pathlib import Path

from lowering import host

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14; mmap has no name for it
_PIECE = 16 << 20  # bytes that are asked for at once; others ask for memory in between
_NODES = Path("/sys/devices/system/node/online")


class PagesAhead:
    """Has the kernel give this process pages while Python imports, until it is stopped.

    Otherwise init and the first step of a CPU take theirs one by one as they write: 0.3 processor
    seconds of a 32M Llama's start, instead of 0.2 on a core that is idle. The memory is free all
    the time, and whoever allocates takes it; so it begins only in a process that keeps what it
    frees (host.keep_pages).

    Source: madvise(2)
    """

    def __init__(self, size: int) -> None:
        """Begin; size is in bytes."""
        self._given, self._stopped = 0, False
        self._thread = threading.Thread(target=self._give, args=(size,), daemon=True)
        if size and host.keeps_pages() and _has_one_node():
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
            place = library.malloc(size)
            library.free(place)
            first = -(-(place or 0) // mmap.PAGESIZE) * mmap.PAGESIZE
            while place and not self._stopped and self._given + _PIECE <= size:
                if library.madvise(first + self._given, _PIECE, _POPULATE_WRITE):
                    return
                self._given += _PIECE


def _has_one_node() -> bool:
    """Whether all memory is equally near; else pages should be near those who write them first."""
    try:
        return _NODES.read_text().strip() == "0"
    except OSError:
        return True
