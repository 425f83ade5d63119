"""A run that loses a host, goes on with fewer, and grows again, without a compilation."""

import json
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from places import Place, meeting_address

THREE = ["--target", "cpu:3x1", "--set", "run.fallback=[2]", "--set", "run.learning_rate.peak=1e-4"]
THREE += ["--set", "program.batch.global_batch_size=9", "--set", "run.steps=60"]
LOST = (75, -signal.SIGKILL, -signal.SIGTERM)
COUNTED = Path(__file__).with_name("counted_compilations.py")


def start(place: Place, count: int, *words: str) -> list[subprocess.Popen[str]]:
    """Begin the first processes of the run of three, which list what they compile in N.json."""
    options = [*THREE, "--coordinator", meeting_address(), "--processes", "3", "--rank"]
    return [
        place.start_python(
            str(COUNTED), f"{rank}.json", "run", "config.toml", *words, *options, str(rank)
        )
        for rank in range(count)
    ]


def kill_after(place: Place, processes: list[subprocess.Popen[str]], step: int) -> None:
    """Kill the last process when a step is complete; the others notice it and end."""
    deadline = time.monotonic() + 100
    while not any(number >= step for number, _, _ in place.curve()):
        assert time.monotonic() < deadline and processes[0].poll() is None
        time.sleep(0.02)
    processes[-1].kill()
    for process in processes:
        process.communicate(timeout=100)
        assert process.returncode in LOST


def finish(place: Place, processes: list[subprocess.Popen[str]]) -> str:
    told = [process.communicate(timeout=200) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), told
    for rank in range(len(processes)):
        assert json.loads((place.path / f"{rank}.json").read_text()) == []
    return told[0][0]


@pytest.mark.usefixtures("compiled_quickly")
def test_a_run_goes_on_with_fewer_processes_and_grows_again_without_a_compilation(cold: Place):
    out, _ = cold.command("compile", "config.toml", *THREE)
    assert "2 hosts: cpu:2x1, mesh data 2, 2 x 6 sequences, 3 of them padding" in out
    assert "Total graphs:      6" in out
    kill_after(cold, start(cold, 3), 10)
    kill_after(cold, start(cold, 2, "--set", "run.watchdog.join_timeout=5"), 30)
    told = finish(cold, start(cold, 3))
    assert "trained 60 steps (resumed from" in told
    whole = start(cold, 3, "--set", "run.directory=whole")
    finish(cold, whole)
    machines = re.findall(r"machine: (\S+)", (cold.path / "run/run.log").read_text())
    assert machines == ["cpu:3x1", "cpu:2x1,", "cpu:3x1"]
    assert [one[0] for one in cold.curve()] == list(range(1, 61))
    for mine, other in zip(cold.curve(), cold.curve("whole"), strict=True):
        assert mine == pytest.approx(other, rel=1e-5)
    ends = [one["validation_loss"] for run in ("run", "whole") for one in cold.journal(run)
            if "validation_loss" in one]  # fmt: skip
    assert ends[0] == pytest.approx(ends[1], rel=1e-5)
