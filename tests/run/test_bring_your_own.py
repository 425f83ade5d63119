"""Optimizer and loss of the user, from the files of the examples to a trained model."""

import shutil

import pytest
from places import CUBE, ROOT

EXAMPLES = ROOT / "examples/bring-your-own"
WORDS = [
    "config.toml",
    *("--set", "program.optimizer.custom=lion.py:lion"),
    *("--set", "program.loss.custom=focal.py:focal"),
    *("--set", "run.learning_rate.peak=1e-3"),
    *("--set", "run.data.train=lines.py:Lines"),
    *("--set", 'run.data.arguments={file = "play.txt"}'),
]


@pytest.mark.usefixtures("compiled_quickly")
def test_the_examples_train_and_an_edit_compiles_again(cold):
    for name in ("lion.py", "focal.py", "lines.py"):
        shutil.copy(EXAMPLES / name, cold.path)
    (cold.path / "play.txt").write_text("ROMEO: and so on, and so on.\n" * 99)
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
    (cold.path / "play.txt").write_text("JULIET: and so on, and so on.\n" * 99)
    allowed = ["--allow-change", "program.optimizer.custom"]
    _, err = cold.command("run", *longer, *allowed, status=2)
    assert "run.data.train was" in err and "--allow-change run.data.train" in err
    cold.command("run", *longer, *allowed, "--allow-change", "run.data.train")


@pytest.mark.usefixtures("compiled_quickly")
def test_the_flax_module_of_the_examples_trains_on_devices_that_shard_it(cold):
    shutil.copy(EXAMPLES / "recurrence.py", cold.path)
    config = (cold.path / "config.toml").read_text()
    model = 'flax = "recurrence.py:Recurrence"\narguments = {embed = 32, mlp = 64}\nvocab = 264\n'
    head, _, tail = config.partition("[program.model]\n")
    rest = tail[tail.index("[program.batch]") :]
    text = f'{head}[program.model]\n{model}dtype = "float32"\n\n{rest}'
    (cold.path / "config.toml").write_text(text)
    losses = {}
    for name, words in {"one": [], "sharded": CUBE}.items():
        words = ["config.toml", *words, "--set", f"run.directory={name}"]
        cold.command("compile", *words)
        cold.command("run", *words)
        losses[name] = [loss for _, loss, _ in cold.curve(name)]
    assert losses["one"][-1] < losses["one"][0] - 0.5
    assert losses["sharded"] == pytest.approx(losses["one"], rel=1e-4)
