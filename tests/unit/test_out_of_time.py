"""Tests that a machine is too slow for are named (tests/out_of_time.py)."""

import subprocess
import sys
from pathlib import Path

import out_of_time
import pytest

TESTS = Path(out_of_time.__file__).parent
SLOW = """
import time
def test_one():
    time.time = lambda: 1e12  # an hour is over
def test_two():
    raise ValueError
"""
QUICK = "def test_three(): pass\n"


def ended(path: Path, *words: str, status: int = 0) -> str:
    (path / "test_a.py").write_text(SLOW)
    (path / "test_b.py").write_text(QUICK)
    command = [sys.executable, "-m", "pytest", "-p", "out_of_time", "-p", "skips"]
    command += ["-c", "/dev/null", "--rootdir", path, "--no-unexpected-skips", *words, path]
    environment = {"PYTHONPATH": str(TESTS)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == status
    return ended.stdout


@pytest.mark.parametrize("workers", [[], ["-n", "1"]])
@pytest.mark.parametrize("minutes", ["0.000001", "0", "-5"])  # .ci/run may have none left
def test_what_is_left_out_is_counted_by_file(tmp_path, workers, minutes):
    out = ended(tmp_path, "--minutes", minutes, *workers, status=1)  # too few
    assert f"3 tests did not run within {float(minutes):g} minutes" in out
    assert "   2 of test_a.py" in out and "   1 of test_b.py" in out
    assert "3 skipped" in out and "failed" not in out


def test_tests_begin_with_the_file_that_is_asked_for(tmp_path):
    out = ended(tmp_path, "--minutes", "60", "--first", "1")  # the second file
    assert "2 passed, 1 skipped" in out  # test_three, test_one
    assert "1 tests did not run" in out and "   1 of test_a.py" in out


def test_without_a_limit_all_run(tmp_path):
    out = ended(tmp_path, status=1)
    assert "1 failed, 2 passed" in out and "did not run" not in out
