"""What this machine's processor is taken for, and what of the machine is left to this process."""

import os
from types import SimpleNamespace

import psutil
import pytest

from lowering.machine import host
from lowering.neuron.persistent_cache.compilation import default_jobs


@pytest.mark.parametrize(
    "flags, float32, bfloat16",
    [
        ("fma avx2 avx512f avx512_bf16 amx_bf16", 64, 2048),
        ("fma avx2 avx512f avx512_bf16", 64, 128),
        ("fma avx2 avx512f", 64, 64),
        ("fma avx2", 32, 32),
        ("sse2", 8, 8),
    ],
)
def test_peak_by_instructions(flags, float32, bfloat16, tmp_path, monkeypatch):
    lines = tmp_path / "cpuinfo"
    lines.write_text(f"processor\t: 0\nflags\t\t: {flags}\ncpu MHz\t\t: 2500.0\n\nprocessor\t: 1\n")
    monkeypatch.setattr(host, "_CPUINFO", lines)
    monkeypatch.setattr(host, "_physical_cores", lambda: 2)
    host._cpuinfo.cache_clear()
    try:
        assert host.peak_flops("float32") == float32 * 2.5e9 * 2
        assert host.peak_flops("bfloat16") == bfloat16 * 2.5e9 * 2
    finally:
        host._cpuinfo.cache_clear()


@pytest.mark.parametrize(
    "vendor, flags, is_fast",
    [
        ("GenuineIntel", "fma avx512f avx512_bf16", False),
        ("GenuineIntel", "fma avx512f avx512_bf16 amx_bf16", True),
        ("AuthenticAMD", "fma avx512f avx512_bf16", True),
        ("AuthenticAMD", "fma avx2", False),
    ],
)
def test_bfloat16_is_fast_where_it_has_more_units(vendor, flags, is_fast, tmp_path, monkeypatch):
    lines = tmp_path / "cpuinfo"
    lines.write_text(f"vendor_id\t: {vendor}\nflags\t\t: {flags}\n")
    monkeypatch.setattr(host, "_CPUINFO", lines)
    host._cpuinfo.cache_clear()
    try:
        assert host.has_fast_bfloat16() == is_fast
    finally:
        host._cpuinfo.cache_clear()


def test_no_peak_where_the_kernel_tells_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "_CPUINFO", tmp_path / "none")
    host._cpuinfo.cache_clear()
    try:
        assert host.peak_flops("bfloat16") == 0.0
    finally:
        host._cpuinfo.cache_clear()


def mount_line(root, directory, kind, options):
    """A line of mountinfo, where spaces are octal numbers."""
    escaped = str(directory).replace(" ", "\\040")
    return f"30 23 0:27 {root} {escaped} rw,nosuid shared:9 master:1 - {kind} cgroup {options}\n"


@pytest.fixture
def container(tmp_path, monkeypatch):
    """A function that limits the memory of this container; the host has 100 GB free."""
    monkeypatch.setattr(host, "_PROCESS", tmp_path)
    (tmp_path / "cgroup").write_text("0::/\n")
    (tmp_path / "mountinfo").write_text(mount_line("/", tmp_path, "cgroup2", "rw"))
    free = SimpleNamespace(available=100 << 30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)

    def limited(limit, used):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text(f"{used}\n")

    return limited


@pytest.mark.parametrize(
    "limit, used, left",
    [(8 << 30, 3 << 30, 5 << 30), (200 << 30, 0, 100 << 30), (8, 9, 0), ("max", 0, 100 << 30)],
)
def test_a_container_has_less_memory_than_its_host(limit, used, left, container):
    container(limit, used)
    assert host.available_memory() == left


def test_outside_of_a_container_the_host_s_memory_is_available(container):
    assert host.available_memory() == 100 << 30


def test_neuron_s_compilers_share_a_container(container, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2})
    assert default_jobs() == 2
    container(60 << 30, 0)
    assert default_jobs() == 1
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    assert host.usable_cores() == default_jobs() == 1


@pytest.fixture
def cgroups(tmp_path, monkeypatch):
    """A function that fabricates what the kernel tells of this process and of its cgroups."""
    monkeypatch.setattr(host, "_PROCESS", tmp_path)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=100 << 30))

    def fabricate(membership, mounts, limits):
        (tmp_path / "cgroup").write_text(membership)
        (tmp_path / "mountinfo").write_text("".join(mounts))
        for directory, (limit, used) in limits.items():
            directory.mkdir(parents=True, exist_ok=True)
            v2 = (directory.relative_to(tmp_path)).parts[0] == "unified"
            names = ("memory.max", "memory.current") if v2 else V1_FILES
            (directory / names[0]).write_text(f"{limit}\n")
            (directory / names[1]).write_text(f"{used}\n")
        return host.available_memory()

    return fabricate


V1_FILES = "memory.limit_in_bytes", "memory.usage_in_bytes"
NO_LIMIT = 9223372036854771712  # of version 1


def test_the_smallest_limit_of_nested_cgroups_counts(cgroups, tmp_path):
    top = tmp_path / "unified"
    limits = {
        top / "slurm": ("max", 5 << 30),
        top / "slurm/job 7": (8 << 30, 2 << 30),
        top / "slurm/job 7/step": (20 << 30, 1 << 30),
        top / "slurm/job 7/step/task": ("max", 1 << 30),
        top / "other": (1 << 30, 0),
    }
    mounts = [mount_line("/", top, "cgroup2", "rw")]
    assert cgroups("0::/slurm/job 7/step/task\n", mounts, limits) == 6 << 30


def test_limits_of_version_1_count_beside_those_of_version_2(cgroups, tmp_path):
    memory, unified = tmp_path / "memory space", tmp_path / "unified"
    limits = {
        memory: (NO_LIMIT, 50 << 30),
        memory / "docker/abc": (4 << 30, 1 << 30),
        unified / "abc": ("max", 0),
    }
    mounts = [
        mount_line("/", tmp_path / "cpu", "cgroup", "rw,cpu,cpuacct"),
        mount_line("/", memory, "cgroup", "rw,memory"),
        mount_line("/", unified, "cgroup2", "rw"),
        "31 23 0:28 / /proc rw - proc proc rw\n",
    ]
    membership = "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n1:name=systemd:/\n0::/abc\n"
    assert cgroups(membership, mounts, limits) == 3 << 30


@pytest.mark.parametrize(
    "root, path",
    [("/docker/abc", "/docker/abc/step"), ("/docker/abc", "/elsewhere"), ("/", "/../../x")],
    ids=["bind mount", "of another container", "outside the namespace"],
)
def test_in_a_container_the_limit_at_the_mount_counts(cgroups, tmp_path, root, path):
    top = tmp_path / "unified"
    limits = {top: (2 << 30, 1 << 30), top / "step": ("max", 0)}
    mounts = [mount_line(root, top, "cgroup2", "rw")]
    assert cgroups(f"0::{path}\n", mounts, limits) == 1 << 30


@pytest.mark.parametrize(
    "kind, options, quotas, cores",
    [
        ("cgroup2", "rw", {"cpu.max": "150000 100000"}, 2),
        ("cgroup2", "rw", {"cpu.max": "max 100000"}, 8),
        ("cgroup2", "rw", {"cpu.max": "6400000 100000"}, 8),
        ("cgroup2", "rw", {"cpu.max": "1000 100000"}, 1),
        ("cgroup", "rw,cpu,cpuacct", {"cpu.cfs_quota_us": 300000, "cpu.cfs_period_us": 100000}, 3),
        ("cgroup", "rw,cpu,cpuacct", {"cpu.cfs_quota_us": -1, "cpu.cfs_period_us": 100000}, 8),
        ("cgroup", "rw,memory", {"cpu.cfs_quota_us": 300000, "cpu.cfs_period_us": 100000}, 8),
    ],
)
def test_a_quota_of_processor_time_is_a_number_of_cores(
    kind, options, quotas, cores, tmp_path, monkeypatch
):
    monkeypatch.setattr(host, "_PROCESS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    controllers = "0:" if kind == "cgroup2" else "3:cpu,cpuacct"
    (tmp_path / "cgroup").write_text(f"{controllers}:/pod/task\n")
    (tmp_path / "mountinfo").write_text(mount_line("/", tmp_path / "top", kind, options))
    (tmp_path / "top/pod/task").mkdir(parents=True)
    for name, value in quotas.items():
        (tmp_path / "top/pod" / name).write_text(f"{value}\n")
    assert host.usable_cores() == cores


def test_without_proc_the_host_counts(monkeypatch, tmp_path):
    monkeypatch.setattr(host, "_PROCESS", tmp_path / "none")
    assert host.available_memory() > 0
