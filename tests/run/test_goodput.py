"""Goodput of a run whose processes are killed, against the clock of the test."""

import signal
import time

import pytest

from graphtrain.checkpoints.steps import saved_steps
from graphtrain.run.goodput.account import read_goodput

_PAUSE = 0.4  # seconds between a kill and the next start


def test_a_run_killed_twice_adds_up_to_its_wall_time(place):
    words = [
        "run",
        "config.toml",
        "--set",
        "run.steps=250",
        "--set",
        "run.checkpoints.local_every=50",
    ]
    checkpoints = place.path / "run/checkpoints"
    began, between = time.time(), 0.0
    for step in (50, 150):
        process = place.start(*words)
        while not (steps := saved_steps(checkpoints)) or steps[-1] < step:
            assert process.poll() is None
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        killed = time.time()
        process.communicate(timeout=60)
        time.sleep(_PAUSE)
        between += time.time() - killed
    last = place.start(*words, "--quiet")
    assert last.stdout is not None and "trained 250 steps" in last.stdout.readline()
    wall = time.time() - began
    last.communicate(timeout=60)
    result = read_goodput(place.path / "run")
    seconds = result.seconds
    assert sum(seconds.values()) == pytest.approx(result.wall_seconds)
    # A record is at most 0.1 s old at a kill, where the thread that writes gets a processor.
    assert result.wall_seconds == pytest.approx(wall, rel=0.01, abs=0.5)
    assert seconds["infrastructure_recovery"] == pytest.approx(between, rel=0.5, abs=0.5)
    assert seconds["unrecorded"] < 0.01 * wall
    assert result.steps == 250
    starts = [one.first_step or 0 for one in result.processes]
    assert starts[0] == 0 and all(step % 50 == 0 and step for step in starts[1:])
    assert all(one.seconds > 0 for one in result.processes)
    assert result.compile_seconds and seconds["step"] > 0 < seconds["checkpoint_restore"]
