"""Killed, stopped and disturbed runs lose nothing."""

import signal
import time

import pytest
from places import CUBE


def begin_and_signal(place, number, *words):
    """Start a run, wait until it is past its first checkpoint, and send a signal."""
    process = place.start("run", "config.toml", *words)
    while len(place.curve()) < 6 and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(number)
    return process.communicate(timeout=120), process.returncode


@pytest.mark.parametrize("words", [[], CUBE], ids=["one device", "eight devices"])
def test_killed_in_the_middle_the_losses_go_on_bit_for_bit(place, words):
    words = [*words, "--set", "run.steps=60"]
    place.command("run", "config.toml", *words, "--set", "run.directory=whole")
    _, status = begin_and_signal(place, signal.SIGKILL, *words)
    assert status == -signal.SIGKILL
    assert len(place.curve()) < 60
    place.command("run", "config.toml", *words)
    assert place.curve() == place.curve("whole")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_stop_it_saves_and_says_how_to_go_on(place, number):
    words = ["--set", "run.steps=200", "--set", "run.checkpoints.local_every=1000"]
    (out, err), status = begin_and_signal(place, number, *words)
    assert status == 128 + number, err
    assert f"stopped by {number.name}" in out and "the same command resumes" in out
    stopped = len(place.curve())
    assert [int(p.name) for p in (place.path / "run/checkpoints").iterdir()] == [stopped]
    _, err = place.command("run", "config.toml", *words)
    place.command("run", "config.toml", *words, "--set", "run.directory=whole")
    assert place.curve() == place.curve("whole")


LATE = """
import contextlib, signal, sys
import graphtrain.run.train as train
from graphtrain.cli import main
from graphtrain.run.signals import StopRequest

class Late(StopRequest):
    asked = 0

    def should_stop(self):
        answer = self.signal is not None
        self.asked += 1
        if self.asked == 6:
            self.signal = signal.SIGTERM
        return answer

train.stop_requests = lambda: contextlib.nullcontext(Late())
sys.argv = ["graphtrain", "run", "config.toml", "--set", "run.checkpoints.local_every=1000"]
main()
"""


def test_a_signal_right_after_it_was_asked_for_saves_too(place):
    process = place.start_python("-c", LATE)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM and "saved in run" in out, err
    steps = [int(path.name) for path in (place.path / "run/checkpoints").iterdir()]
    assert steps == [len(place.curve())]


def test_two_runs_in_one_directory_are_refused(place):
    process = place.start("run", "config.toml", "--set", "run.steps=100000")
    while not place.curve() and process.poll() is None:
        time.sleep(0.01)
    _, err = place.command("run", "config.toml", status=2)
    process.kill()
    process.communicate()
    assert "another process is training into run" in err
