"""A decay that is decided later: a branch from a checkpoint of a run at a stable learning rate."""

import json
from pathlib import Path

WSD = [
    "--set", "run.learning_rate.schedule=wsd", "--set", "run.learning_rate.decay_steps=4",
]  # fmt: skip


def test_a_decay_branch_compiles_nothing_and_equals_an_uninterrupted_run(place):
    place.command("run", "config.toml", *WSD)  # 16 steps; checkpoints 8, 12, 16 are kept
    words = ["--to", "config.toml", "--step", "8"]
    place.command("convert", "reshard", "run", "branch", *words)
    shorter = [*WSD, "--set", "run.steps=12"]
    counted = Path(__file__).with_name("counted_compilations.py")
    words = ["run", "config.toml", *shorter, "--set", "run.directory=branch"]
    process = place.start_python(str(counted), "events.json", *words)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert json.loads((place.path / "events.json").read_text()) == []
    assert "run.steps was 16 and is 12: the wsd schedule" in err
    place.command("run", "config.toml", *shorter, "--set", "run.directory=whole")
    assert place.curve("branch") == place.curve("whole")
    rates = [one["learning_rate"] for one in place.journal("branch") if "loss" in one]
    assert rates[7] == 1e-2 and rates[8] == 0.5e-2 and rates[11] == 0.0


def test_a_run_of_another_schedule_decays_if_each_change_is_permitted(place):
    constant = ["--set", "run.learning_rate.schedule=constant", "--set", "run.steps=8"]
    place.command("run", "config.toml", *constant)
    words = [*WSD, "--set", "run.steps=12"]
    _, err = place.command("run", "config.toml", *words, status=2)
    assert 'run.learning_rate.schedule was "constant" and is "wsd"' in err
    names = "run.learning_rate.schedule", "run.learning_rate.decay_steps"
    assert all(f"--allow-change {name}" in err for name in names)
    allowed = [word for name in names for word in ("--allow-change", name)]
    place.command("run", "config.toml", *words, *allowed)
    rates = [one["learning_rate"] for one in place.journal() if "loss" in one]
    assert rates[7] == 1e-2 and rates[8] == 0.5e-2 and rates[11] == 0.0
