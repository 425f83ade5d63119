"""What distinguishes this machine's processor, read without starting a backend."""

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import resource
import sys
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_GROUP = Path("/sys/fs/cgroup")  # this container's
# M_ARENA_MAX: one; M_MMAP_MAX: nothing from mmap; M_TRIM_THRESHOLD: never, it is unsigned.
_KEEP = {-8: 1, -4: 0, -1: -1}
_kept: list[bool] = []  # of each parameter, whether the C library took it


@functools.cache
def processor() -> dict[str, str]:
    """Name and instruction-set digest of this processor.

    XLA compiles CPU programs for the processor it runs on, and on another one only logs that
    features are missing before it dies of an illegal instruction; so both go into the key.
    """
    fields = _cpuinfo()
    name = fields.get("model name") or platform.processor() or platform.machine()
    features = " ".join(sorted((fields.get("flags") or fields.get("Features") or name).split()))
    return {
        "architecture": platform.machine(),
        "name": name,
        "features": hashlib.sha256(features.encode()).hexdigest()[:16],
    }


def memory_bytes() -> int:
    """Physical memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_memory() -> int:
    """Bytes that new processes can take: the host's, or what is left to this container."""
    import psutil

    available = psutil.virtual_memory().available
    try:
        limit, used = (
            int((_GROUP / name).read_text()) for name in ("memory.max", "memory.current")
        )
    except (OSError, ValueError):  # no version 2 groups, or "max"
        return available
    return min(available, max(0, limit - used))


def usable_cores() -> int:
    """How many cores this process may use; Slurm and containers give some of the host's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def resident_bytes() -> int:
    """Memory this process holds now; 0 where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak_resident_bytes() -> int:
    """Most memory this process has held so far, or since forget_peak()."""
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    except (OSError, IndexError):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def forget_peak() -> int:
    """Let the peak begin anew, where the kernel can (Linux, proc(5) clear_refs); what it is then.

    Without this, what imports once held would count as held by a small program.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return peak_resident_bytes()


def keep_pages() -> None:
    """Have this process keep the memory that it frees, where its C library is glibc.

    XLA:CPU takes the temporaries of every step anew. By default they come from the kernel each
    time, page by page: a third of a step's processor time beside the arithmetic. One arena, since
    others give their memory back whatever is asked. To be called before anything begins threads.

    Source: mallopt(3)
    """
    with contextlib.suppress(OSError, AttributeError):  # another system, another C library
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in _KEEP.items():
            _kept.append(mallopt(parameter, value) == 1)


def keeps_pages() -> bool:
    """Whether keep_pages has done so."""
    return bool(_kept) and all(_kept)


def peak_flops(dtype: str) -> float:
    """Multiply-adds of this machine's cores, counted twice, per second.

    Per core and cycle: float32 on two FMA units of 16 (AVX-512) or 8 (AVX2) lanes; bfloat16 2048
    with AMX, twice float32 with AVX512_BF16, else as float32. An upper bound, as far as the clock
    is one: the kernel's figure, which in a virtual machine may be less than the cores run at.
    Source: Intel 64 and IA-32 Optimization Reference Manual, 248966-050, sections 18 and 20.
    """
    fields = _cpuinfo()
    flags = set(fields.get("flags", "").split())
    if not flags:
        return 0.0
    per_cycle = 64 if "avx512f" in flags else 32 if "fma" in flags else 8
    if dtype == "bfloat16" and "amx_bf16" in flags:
        per_cycle = 2048
    elif dtype == "bfloat16" and "avx512_bf16" in flags:
        per_cycle *= 2
    hertz = float(fields.get("cpu MHz", 0)) * 1e6
    return per_cycle * hertz * _physical_cores()


@functools.cache
def _cpuinfo() -> dict[str, str]:
    """The kernel's lines about the first processor; empty where there is no such file."""
    try:
        first = _CPUINFO.read_text().partition("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _physical_cores() -> int:
    """Cores this process may use; two hardware threads of one core count once."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else {0}
    siblings = Path("/sys/devices/system/cpu")
    cores = set()
    for cpu in usable:
        path = siblings / f"cpu{cpu}/topology/thread_siblings_list"
        cores.add(path.read_text() if path.exists() else str(cpu))
    return len(cores)
