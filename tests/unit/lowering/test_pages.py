"""Memory that a process frees stays its own, where the C library is glibc."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

# In a thread, as XLA does; a megabyte of pages is 256.
FAULTS = """
import resource, sys, threading
from lowering.machine import host

if sys.argv[1] == "kept":
    host.retain_freed_memory()

def fill():
    bytearray(64 << 20)

faults = []
for _ in range(3):
    thread = threading.Thread(target=fill)
    thread.start()
    thread.join()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(faults[2] - faults[1])
"""

# The pages of what is allocated after are there already; a stop in between leaves what there is.
# Two threads have ended before, as those that verify a checkpoint: malloc has an arena for each.
AHEAD = """
import resource, sys, threading
from concurrent.futures import ThreadPoolExecutor
from lowering.machine import host
from lowering.machine.startup import MemoryPrefault

both = threading.Barrier(2)
with ThreadPoolExecutor(2) as pool:
    list(pool.map(lambda _: both.wait() and bytearray(100_000), range(2)))
host.usable_cores = lambda: 2
if sys.argv[1] == "kept":
    host.retain_freed_memory()
ahead = MemoryPrefault(int(sys.argv[2]) << 20)
while sys.argv[2] == "128" and threading.active_count() > 1:
    pass
given = ahead.stop()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
whole = bytes(range(251)) * (max(given - 4096, 0) // 251)
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(given >> 20, faults, whole[:251] == bytes(range(251)))
"""

HUGE = """
import sys
from pathlib import Path
from lowering.machine import host
from lowering.machine.memory_pages import use_huge_pages

def huge():
    described = Path("/proc/self/smaps_rollup").read_text()
    return int(described.partition("AnonHugePages:")[2].split()[0])

if sys.argv[1] == "kept":
    host.retain_freed_memory()
filled = bytes(range(251)) * (128 << 12)
before = huge()
thread = use_huge_pages()
if thread is not None:
    thread.join()
print((huge() - before) >> 10, len(filled) >> 20, filled == bytes(range(251)) * (128 << 12))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_pages_are_taken_from_the_kernel_once():
    def faults(how: str) -> int:
        command = [sys.executable, "-c", FAULTS, how]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    assert faults("default") > 16_000
    assert faults("kept") < 100


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_pages_that_come_ahead_are_those_that_are_used():
    def measured(how: str, megabytes: int) -> list[str]:
        command = [sys.executable, "-c", AHEAD, how, str(megabytes)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()

    given, faults, whole = measured("kept", 128)
    if given == "0":
        pytest.skip("several memory nodes")
    assert given == "128" and int(faults) < 100 and whole == "True"
    assert measured("default", 128)[0] == "0"  # it would be given back
    assert int(measured("kept", 100_000)[0]) < 1000  # stopped in time, of more than there may be


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_pages_that_are_merged_hold_what_they_held():
    def measured(how: str) -> list[str]:
        command = [sys.executable, "-c", HUGE, how]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()

    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not enabled.exists() or "[never]" in enabled.read_text():
        pytest.skip("a kernel without huge pages")
    merged, size, equal = measured("kept")
    if merged == "0":
        pytest.skip("a kernel before Linux 6.1")
    assert int(merged) > int(size) / 2 and equal == "True"
    assert measured("default")[0] == "0"  # it would be given back
