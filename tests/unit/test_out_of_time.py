"""Tests that a machine is too slow for are named (tests/out_of_time.py)."""

import re
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
    (path / "test_c.py").write_text(QUICK)
    (path / "tests").mkdir()
    (path / "tests/slow_files.txt").write_text("test_a.py\ntest_c.py\n")
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
    assert f"4 tests did not run within {float(minutes):g} minutes" in out
    assert "   2 of test_a.py" in out and "   1 of test_b.py" in out
    assert "4 skipped" in out and "failed" not in out


@pytest.mark.parametrize(("first", "order"), [("1", "bca"), ("2", "bac"), ("3", "bca")])
def test_slow_files_come_last_and_take_turns_to_be_first_of_them(tmp_path, first, order):
    out = ended(tmp_path, "--collect-only", "--quiet", "--first", first)
    files = re.findall(r"^test_(\w)\.py::", out, re.M)
    assert list(dict.fromkeys(files)) == list(order)


def test_a_slow_file_is_left_out_before_another(tmp_path):
    out = ended(tmp_path, "--minutes", "60", "--first", "2")
    assert "2 passed, 2 skipped" in out  # test_three, test_one
    assert "   1 of test_a.py" in out and "   1 of test_c.py" in out and "of test_b" not in out


def test_slow_files_exist():
    listed = (TESTS / "slow_files.txt").read_text().split()
    assert [name for name in listed if not (TESTS.parent / name).exists()] == []
    assert sorted(set(listed)) == listed


def test_without_a_limit_all_run(tmp_path):
    out = ended(tmp_path, status=1)
    assert "1 failed, 3 passed" in out and "did not run" not in out
