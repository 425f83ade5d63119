"""CPU and memory of this machine, read without starting a JAX backend."""

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import re
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_CPUINFO = Path("/proc/cpuinfo")
_PROCESS = Path("/proc/self")
# Files of a cgroup with its quota of processor time and the period of the quota
_QUOTA_FILES = {"cgroup2": ("cpu.max",), "cgroup": ("cpu.cfs_quota_us", "cpu.cfs_period_us")}
# Files of a cgroup with the limit of its memory and what is used of it, by type of file system
_CGROUP_FILES = {
    "cgroup2": ("memory.max", "memory.current"),
    "cgroup": ("memory.limit_in_bytes", "memory.usage_in_bytes"),
}
# mallopt parameters: M_ARENA_MAX = 1; M_MMAP_MAX = 0, never use mmap; M_TRIM_THRESHOLD = -1, never
# trim (the value is unsigned).
_MALLOPT = {-8: 1, -4: 0, -1: -1}
_kept: list[bool] = []  # for each parameter, whether the C library accepted it


@functools.cache
def processor() -> dict[str, str]:
    """Return architecture, model name and a digest of the instruction set of this CPU.

    XLA compiles CPU programs for the CPU it runs on. On another CPU, it only logs that features are
    missing and then crashes with an illegal instruction. The cache key therefore contains all
    three.
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
    """Return the bytes of physical memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_memory() -> int:
    """Return the bytes available to new processes: of the host, or the rest of a cgroup limit."""
    import psutil

    return min([psutil.virtual_memory().available, *_cgroup_memory_left()])


def _cgroup_memory_left() -> Iterator[int]:
    """Yield what each limit on this process leaves of its memory."""
    for kind, directory in _cgroups("memory"):
        with contextlib.suppress(OSError, ValueError):  # the root has no limit; "max" is none
            limit, usage = (int((directory / name).read_text()) for name in _CGROUP_FILES[kind])
            yield max(0, limit - usage)


def _cgroup_cores() -> Iterator[int]:
    """Yield the number of cores of each quota of processor time on this process, rounded up.

    Source: "CPU Controller" of cgroup-v2.rst and sched-bwc.rst of the Linux kernel
    """
    for kind, directory in _cgroups("cpu"):
        with contextlib.suppress(OSError, ValueError):  # the root has no quota; "max" is none
            fields = [(directory / name).read_text() for name in _QUOTA_FILES[kind]]
            quota, period = map(int, " ".join(fields).split())
            if quota > 0 and period > 0:  # of version 1, -1 is none
                yield -(-quota // period)


def _cgroups(controller: str) -> Iterator[tuple[str, Path]]:
    """Yield type of file system and directory of each cgroup of this process, versions 1 and 2.

    A limit applies to a cgroup and all below it, so each one up to the root counts.

    Source: cgroups(7), proc_pid_mountinfo(5)
    """
    try:
        memberships = (_PROCESS / "cgroup").read_text().splitlines()
        mounts = (_PROCESS / "mountinfo").read_text().splitlines()
    except OSError:  # not Linux
        return
    for kind, root, mount_point, options in map(_cgroup_mount, mounts):
        for membership in memberships:
            _, controllers, path = membership.split(":", 2)
            names = controllers.split(",")
            if kind == ("cgroup2" if controllers == "" else "cgroup") and (
                kind == "cgroup2" or {controller} <= {*names} & {*options}
            ):
                yield from ((kind, one) for one in _up_to(mount_point, _below(root, path)))


def _cgroup_mount(line: str) -> tuple[str, str, Path, list[str]]:
    """Return type, root, mount point and options of the file system in a line of mountinfo."""
    fields, _, file_system = line.partition(" - ")
    root, mount_point = (_unescape(field) for field in fields.split(" ")[3:5])
    kind, *_, options = file_system.split(" ")
    return kind, root, Path(mount_point), options.split(",")


def _unescape(field: str) -> str:
    """Return a path of mountinfo, in which spaces, tabs and the like are octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _below(root: str, path: str) -> str:
    """Return the path of a cgroup below its mount, of which a container may see only a part."""
    try:
        below = PurePosixPath(path).relative_to(root).as_posix()
    except ValueError:
        return "."
    return "." if ".." in below.split("/") else below


def _up_to(top: Path, below: str) -> Iterator[Path]:
    """Yield a directory and those that contain it, up to the top."""
    for directory in (top / below, *(top / below).parents):
        yield directory
        if directory == top:
            return


def usable_cores() -> int:
    """Return the number of cores this process may use, as limited by Slurm or a container.

    A quota of processor time counts like a number of cores: docker --cpus, a limit of Kubernetes,
    CPUQuota of systemd.
    """
    return min([len(usable_cpus()), *_cgroup_cores()])


def usable_cpus() -> set[int]:
    """Return the numbers of the CPUs on which this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def process_started_at() -> float:
    """Return the Unix time at which this process started; the current time if it is unknown."""
    now = time.time()
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # seconds since the machine booted
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, ValueError, IndexError, AttributeError):  # no Linux
        return now
    return now - age if started and age > 0 else now


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes; 0 where there is no /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak_resident_bytes() -> int:
    """Return the peak resident memory of this process in bytes, since start or reset_peak()."""
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    except (OSError, IndexError):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak() -> int:
    """Reset the peak resident memory on Linux (clear_refs in proc(5)); return the new peak.

    Without a reset, the peak of a small program would include memory that only imports used.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return peak_resident_bytes()


def retain_freed_memory() -> None:
    """Configure malloc to retain freed memory instead of returning it to the kernel (glibc only).

    XLA:CPU allocates the temporaries of every step anew. By default each allocation faults its
    pages in again, which costs a third of a step's CPU time in addition to the arithmetic. One
    arena is used because the others always return their memory. Call this before any thread
    starts.

    Source: mallopt(3)
    """
    with contextlib.suppress(OSError, AttributeError):  # another system or C library
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in _MALLOPT.items():
            _kept.append(mallopt(parameter, value) == 1)


def retains_freed_memory() -> bool:
    """Return whether retain_freed_memory() succeeded."""
    return bool(_kept) and all(_kept)


def peak_flops(dtype: str) -> float:
    """Return the peak FLOP/s of this machine's cores; a multiply-add counts as two operations.

    Per core and cycle: float32 on two FMA units of 16 (AVX-512) or 8 (AVX2) lanes; bfloat16 2048
    with AMX, twice float32 with AVX512_BF16, else as float32. This is an upper bound if the clock
    rate is one: it is the kernel's value, which in a virtual machine may be less than the actual
    rate.

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


def has_fast_bfloat16() -> bool:
    """Return whether this CPU multiplies bfloat16 matrices faster than float32 ones.

    AMX does, and AVX512_BF16 of AMD, twice as fast. On Intel's cores, XLA's product with
    AVX512_BF16 takes 1.6 times as long as in float32; without it, operands are converted.
    """
    fields = _cpuinfo()
    flags = set((fields.get("flags") or fields.get("Features", "")).split())
    is_amd = fields.get("vendor_id") == "AuthenticAMD"
    return bool(flags & {"amx_bf16", "bf16"}) or (is_amd and "avx512_bf16" in flags)


@functools.cache
def _cpuinfo() -> dict[str, str]:
    """Return the fields of the first CPU in /proc/cpuinfo; empty where there is no such file."""
    try:
        first = _CPUINFO.read_text().partition("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _physical_cores() -> int:
    """Count the physical cores this process may use; hardware threads of one core count once."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else {0}
    siblings = Path("/sys/devices/system/cpu")
    cores = set()
    for cpu in usable:
        path = siblings / f"cpu{cpu}/topology/thread_siblings_list"
        cores.add(path.read_text() if path.exists() else str(cpu))
    return len(cores)
