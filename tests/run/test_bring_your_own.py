"""Optimizer and loss of the user, from the files of the examples to a trained model."""

import shutil

import pytest
from places import ROOT

EXAMPLES = ROOT / "examples/bring-your-own"
WORDS = [
    "config.toml",
    *("--set", "program.optimizer.custom=lion.py:lion"),
    *("--set", "program.loss.custom=focal.py:focal"),
    *("--set", "run.learning_rate.peak=1e-3"),
]


@pytest.mark.usefixtures("compiled_quickly")
def test_the_examples_train_and_an_edit_compiles_again(cold):
    for name in ("lion.py", "focal.py"):
        shutil.copy(EXAMPLES / name, cold.path)
    cold.command("compile", *WORDS)
    cold.command("run", *WORDS)
    losses = [loss for _, loss, _ in cold.curve()]
    assert losses[-1] < losses[0] - 0.3

    source = (cold.path / "lion.py").read_text()
    (cold.path / "lion.py").write_text(source.replace("0.99", "0.9"))
    out, _ = cold.command("cache", "explain", *WORDS)
    assert "optimizer custom sources lion.py changed" in out
    longer = [*WORDS, "--set", "run.steps=18"]
    cold.command("compile", *longer)
    _, err = cold.command("run", *longer, status=2)
    assert "program.optimizer.custom" in err
    cold.command("run", *longer, "--allow-change", "program.optimizer.custom")
