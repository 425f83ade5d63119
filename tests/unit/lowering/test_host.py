"""What this machine's processor is taken for."""

import pytest

from lowering import host


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
