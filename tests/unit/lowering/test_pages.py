"""Memory that a process frees stays its own, where the C library is glibc."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

# In a thread, as XLA does; a megabyte of pages is 256.
FAULTS = """
import resource, sys, threading
from lowering import host

if sys.argv[1] == "kept":
    host.keep_pages()

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

AHEAD = """
import resource, sys, threading
from pathlib import Path
from lowering import host
from lowering.pages import PagesAhead

if sys.argv[1] == "kept":
    host.keep_pages()
ahead = PagesAhead(64 << 20)
while threading.active_count() > 1:
    pass
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
given = ahead.stop()
whole = bytearray(max(given - 4096, 0))
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
described = Path("/proc/self/smaps_rollup").read_text()
print(given >> 20, faults, described.partition("AnonHugePages:")[2].split()[0])
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
    def measured(how: str) -> list[int]:
        command = [sys.executable, "-c", AHEAD, how]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return [int(word) for word in done.stdout.split()]

    given, faults, kilobytes_of_huge_pages = measured("kept")
    if not given:
        pytest.skip("a kernel before Linux 5.14, or several memory nodes")
    # Of 16,000: what lies before the first huge page is not given.
    assert given == 64 and faults < 700
    if "[never]" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        assert kilobytes_of_huge_pages >= given << 9  # half of it, at least
    assert measured("default")[0] == 0  # it would be given back
