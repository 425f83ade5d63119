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


def test_no_peak_where_the_kernel_tells_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "_CPUINFO", tmp_path / "none")
    host._cpuinfo.cache_clear()
    try:
        assert host.peak_flops("bfloat16") == 0.0
    finally:
        host._cpuinfo.cache_clear()


@pytest.fixture
def container(tmp_path, monkeypatch):
    """A function that limits the memory of this container; the host has 100 GB free."""
    monkeypatch.setattr(host, "_CGROUP", tmp_path)
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
