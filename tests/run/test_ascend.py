"""The command for Ascend: trained by MindSpore on CPUs, in a process for each rank."""

import importlib.util
import shlex
import signal
import socket

import pytest
from places import Place

PLACE = ["--set", "program.mesh.data=2", "--set", "program.mesh.tensor=2"]
STEPS = ["--set", "run.steps=20", "--set", "run.evaluate_every=10"]

pytestmark = pytest.mark.usefixtures("compiled_quickly")
installed = pytest.mark.skipif(
    importlib.util.find_spec("mindspore") is None, reason="needs pip install 'graphtrain[ascend]'"
)


def on_two_hosts(place: Place, *words: str) -> None:
    """Train in two processes, each with half of the ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = f"127.0.0.1:{free.getsockname()[1]}"
    options = ["--coordinator", meeting, "--processes", "2", "--rank"]
    both = [place.start("run", *words, *options, rank) for rank in "01"]
    told = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    assert not told[1][0]  # the first speaks for both


@installed
def test_two_hosts_train_as_a_cpu_does_and_one_goes_on(cold):
    """20 steps on two hosts of two ranks beside XLA; from there on one of four, and on XLA."""
    two, one, xla = (
        ["config.toml", *PLACE, "--target", target, "--set", f'run.directory="{directory}"']
        for target, directory in (
            ("ascend-cpu:2x2", "asc"),
            ("ascend-cpu:4", "asc"),
            ("cpu:4", "cpu"),
        )
    )
    for words in (two, one, xla):
        cold.command("compile", *words)
    on_two_hosts(cold, *two, *STEPS)
    cold.command("run", *xla, *STEPS)
    theirs, ours = cold.journal("cpu"), cold.journal("asc")
    assert [record["step"] for record in ours] == [record["step"] for record in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        name = "loss" if "loss" in mine else "validation_loss"
        assert mine[name] == pytest.approx(other[name], abs=1e-4)
    cold.command("run", *one, *STEPS, "--set", "run.steps=22")
    cold.command("run", *xla, *STEPS, "--set", "run.steps=24", "--set", 'run.directory="asc"')
    assert cold.journal("asc")[-1]["step"] == 24
    cold.command("cache", "verify")


@installed
def test_a_signal_saves_and_the_next_run_goes_on(cold):
    words = ["config.toml", "--target", "ascend-cpu:1", "--set", "run.checkpoints.local_every=100"]
    words += ["--set", "run.steps=400"]
    cold.command("compile", *words)
    process = cold.start("run", *words)
    for line in process.stderr:
        if line.startswith("step 2/"):
            process.send_signal(signal.SIGTERM)
            break
    _, err = process.communicate(timeout=200)
    assert process.returncode == 128 + signal.SIGTERM, err
    stopped = cold.journal()[-1]["step"]
    assert 2 <= stopped < 400
    cold.command("run", *words, "--set", f"run.steps={max(stopped, 2) + 2}")
    assert cold.journal()[-1]["step"] == stopped + 2


def test_without_cann_graphs_are_complete_and_a_run_says_what_it_takes(cold):
    words = ["config.toml", "--target", "ascend910b:4", *PLACE]
    out, _ = cold.command("compile", *words)
    assert "compiled:        3" in out
    assert "The graphs for ascend910b:4 are compiled, but this machine cannot run them: it" in out
    assert f"graphtrain {shlex.join(['run', *words])} --cache {cold.cache}" in out
    _, err = cold.command("run", *words, status=2)
    assert "mindspore" in err.lower()
    assert "CANN" in err or "pip install 'graphtrain[ascend]'" in err


def test_another_number_of_hosts_is_refused(cold):
    words = ["--target", "ascend910b:16", "--set", "program.batch.global_batch_size=16"]
    _, err = cold.command("run", "config.toml", *words, status=2)
    assert "ascend910b:16 requires 2 processes, one for each host, but this run has 1" in err
