"""Tricks that only make the start of a run shorter, each by at least 5 % of it on a CPU.

Measured: seconds from the process to the first finished step of a 32M model on cpu:1 with a warm
cache (tests/benchmarks/start.py), with and without each trick in alternation, 11 rounds in random
order, median of the ratios by round. With all of them a start took 1.47 s on 2 cores; jax 0.10.2,
Python 3.11, 2026-11-22. Removed for a smaller gain: data opened in a thread while init runs
(1.5 %), no search for pydantic's plugins (1.5 %).

May be imported before any other library.
"""

import ctypes
import gc
import importlib
import os
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

from lowering.machine import host

_MEMSET_BYTES = 64 << 20  # bytes per memset call, about 0.03 s; Python runs between two calls
_NODES = Path("/sys/devices/system/node/online")


def pause_garbage_collection() -> None:
    """Stop collecting garbage during imports, which would free nothing. Gain: 9 %."""
    gc.disable()


def resume_garbage_collection() -> None:
    """Collect garbage again, but never look at the objects that were imported until now.

    Without pause_garbage_collection() it does nothing: objects of a notebook may become garbage.
    """
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def skip_blas_threads() -> None:
    """Let NumPy start no threads for matrix products, which a run leaves to XLA. Gain: 5 %."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def import_without(name: str, *others: str) -> ModuleType:
    """Import a library as if some of its optional dependencies were not installed.

    Dependencies that are already imported remain available. No other thread may import them at the
    same time. Gain: 13 % for Grain without Orbax; tensorboardX without PyTorch, which is imported
    after the first step, saves more than 2 s where PyTorch is installed.

    Args:
        name: module to import.
        others: optional dependencies to hide.
    """
    hidden = [dependency for dependency in others if dependency not in sys.modules]
    for dependency in hidden:
        sys.modules[dependency] = None  # pyright: ignore[reportArgumentType]  # "not found", to import
    try:
        return importlib.import_module(name)
    finally:
        for dependency in hidden:
            del sys.modules[dependency]


def import_jax() -> None:
    """Import JAX, which finds the plugin of ROCm by the names of the packages' folders.

    At each import, jax 0.10 parses the metadata of all installed packages to look for that plugin.
    Gain: 0.065 s of the 0.40 s that the import takes, where 252 packages are installed.
    """
    if "jax" in sys.modules:
        return
    from importlib import metadata  # takes 0.01 s

    search = metadata.distributions

    def distributions(**context: Any) -> Any:
        asks = sys._getframe(1).f_globals.get("__name__", "")
        if context or not asks.startswith("jax."):
            return search(**context)
        return _rocm_plugins()

    metadata.distributions = distributions
    try:
        importlib.import_module("jax")
    finally:
        metadata.distributions = search


def _rocm_plugins() -> list[Any]:
    """Return the installed packages whose names may be that of JAX's plugin of ROCm."""
    from importlib import metadata

    folders = [Path(entry or ".") for entry in sys.path]
    return [
        metadata.Distribution.at(path)
        for folder in folders
        if folder.is_dir()
        for path in sorted(folder.glob("jax[-_.]rocm*-info"))
    ]


class MemoryPrefault:
    """Background thread that prefaults memory while Python imports modules, until stopped.

    Otherwise init and the first step on a CPU fault their pages in as they write, when every core
    computes; imports use one core. Pages are written, not requested with madvise(2), because
    madvise holds a lock that each mmap(2) of an import waits for, and is no faster. Once stopped,
    the memory is free for any allocation. The thread therefore starts only in a process that
    retains freed memory (host.retain_freed_memory, glibc only).

    Gain: 7 % where another core is idle (0.93 to 0.86 s, EPYC; 1.13 to 1.05 s with the two removed
    tricks), a loss of 7 % while other processes use both cores.
    """

    def __init__(self, size: int) -> None:
        """Start the thread; size is in bytes."""
        self._prefaulted, self._stopped = 0, False
        self._thread = threading.Thread(target=self._prefault, args=(size,), daemon=True)
        if size and host.retains_freed_memory() and host.usable_cores() > 1 and _has_one_node():
            self._library = _libc()
            # Here, in the arena of the main thread. The other one might get the arena of a thread
            # that has ended, from which malloc maps such a size by itself, and free unmaps it.
            self._address = self._library.malloc(size)
            self._thread.start()

    def stop(self) -> int:
        """Stop the thread; return the number of bytes prefaulted."""
        self._stopped = True
        if self._thread.ident is not None:
            self._thread.join()
        return self._prefaulted

    def _prefault(self, size: int) -> None:
        library, address = self._library, self._address
        while address and not self._stopped and self._prefaulted < size:
            chunk_size = min(_MEMSET_BYTES, size - self._prefaulted)
            library.memset(address + self._prefaulted, 0, chunk_size)
            self._prefaulted += chunk_size
        library.free(address)


def _libc() -> Any:
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    library.malloc.argtypes = [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    library.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    return library


def _has_one_node() -> bool:
    """Return whether there is one NUMA node; with several, the first writer should place a page."""
    try:
        return _NODES.read_text().strip() == "0"
    except OSError:
        return True
