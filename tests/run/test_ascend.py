"""The command for Ascend: trained by MindSpore on CPUs, in a process for each rank."""

import importlib.util
import signal

import pytest

PLACE = ["--set", "program.mesh.data=2", "--set", "program.mesh.tensor=2"]
STEPS = ["--set", "run.steps=20", "--set", "run.evaluate_every=10"]

installed = pytest.mark.skipif(
    importlib.util.find_spec("mindspore") is None, reason="needs pip install 'graphtrain[ascend]'"
)


@installed
@pytest.mark.slow
def test_four_ranks_train_as_a_cpu_does(cold):
    for target in ("cpu:4", "ascend-cpu:4"):
        words = ["config.toml", "--target", target, *PLACE]
        directory = ["--set", f'run.directory="{target[:3]}"']
        cold.command("compile", *words)
        cold.command("run", *words, *STEPS, *directory)
    theirs, ours = cold.journal("cpu"), cold.journal("asc")
    assert [record["step"] for record in ours] == [record["step"] for record in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        name = "loss" if "loss" in mine else "validation_loss"
        assert mine[name] == pytest.approx(other[name], abs=1e-4)
    # From the checkpoint of 20, and on XLA from that of MindSpore.
    again = ["config.toml", *PLACE, *STEPS, "--set", 'run.directory="asc"']
    cold.command("run", *again, "--target", "ascend-cpu:4", "--set", "run.steps=22")
    cold.command("run", *again, "--target", "cpu:4", "--set", "run.steps=24")
    assert cold.journal("asc")[-1]["step"] == 24
    cold.command("cache", "verify")


@installed
def test_a_signal_saves_and_the_next_run_goes_on(cold):
    words = ["config.toml", "--target", "ascend-cpu:1", "--set", "run.save_every=100"]
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
    _, err = cold.command("run", *words, status=2)
    assert "mindspore" in err.lower()
    assert "CANN" in err or "pip install 'graphtrain[ascend]'" in err
