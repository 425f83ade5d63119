"""Memory that a process frees stays its own, where the C library is glibc."""

import platform
import subprocess
import sys

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
print(given >> 20, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
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
    def measured(how: str) -> tuple[int, int]:
        command = [sys.executable, "-c", AHEAD, how]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        given, faults = done.stdout.split()
        return int(given), int(faults)

    given, faults = measured("kept")
    if not given:
        pytest.skip("a kernel before Linux 5.14, or several memory nodes")
    assert given == 64 and faults < 100
    assert measured("default")[0] == 0  # it would be given back
