"""Phases of a run: nothing is compiled at a change, and the curve is that of programs in a row."""

import json
import signal
from pathlib import Path

import pytest
from places import CONFIG, Place, furnish

# Batches of 4, then of 8 in two microbatches, then longer sequences with other rotary angles.
PHASES = """
[[program.phase]]
until = 4
seq_len = 32
rope_theta = 1e4

[[program.phase]]
until = 7
seq_len = 32
global_batch_size = 8
microbatches = 2
rope_theta = 1e4

"""
CHANGES = {
    "seq_len = 32\n\n": "seq_len = 64\n\n",
    "global_batch_size = 8": "global_batch_size = 4",
    'dtype = "float32"': 'dtype = "float32"\nrope_theta = 4e4',
    "steps = 16": "steps = 10",
    "local_every = 4": "local_every = 1\nkeep = 99",
    "warmup_steps = 2": 'warmup_steps = 2\nschedule = "constant"',
    "[run]\n": f"{PHASES}[run]\n",
}
# One process for all runs, whose start takes longer than they do.
SCRIPT = """
import json
import shutil
from pathlib import Path

from jax import monitoring

import graphtrain as gt

results = {"labels": [one.label for one in gt.compile("config.toml").outcomes]}
events = []


def record(event, duration_secs, **_):
    if event.startswith("/jax/core/compile/"):
        events.append(event)


monitoring.register_event_duration_secs_listener(record)
gt.train("config.toml", set=["run.directory=whole", "run.evaluate_every=4"])
results["events"] = list(events)
for step in (2, 4, 8):  # killed in a phase, at its end, and after the first step of the next one
    name = f"killed-{step}"
    shutil.copytree("whole", name)
    for saved in Path(name, "checkpoints").iterdir():
        if saved.name.isdigit() and int(saved.name) > step:
            shutil.rmtree(saved)
    summary = gt.train("config.toml", set=[f"run.directory={name}"])
    results[name] = summary.resumed_from


def by_hand(steps, settings, allowed, directory="hand"):
    words = ["program.phase=[]", f"run.directory={directory}", f"run.steps={steps}", *settings]
    try:
        gt.train("config.toml", set=words, allow_change=allowed)
    except gt.UserError as error:
        return str(error)


NAMES = "loss", "grad_norm"
SHORT = ["program.batch.seq_len=32", "program.model.rope_theta=1e4"]
EIGHT = ["program.batch.global_batch_size=8", "program.batch.microbatches=2"]
batch, length = "program.batch.global_batch_size", "program.batch.seq_len"
theta = "program.model.rope_theta"
by_hand(4, SHORT, [])
by_hand(7, [*SHORT, *EIGHT], [batch])
results["refused theta"] = by_hand(10, [], [batch, length])
by_hand(10, [], [batch, length, theta])
results["refused phases"] = by_hand(12, [], [], directory="whole")
results["evaluation"] = gt.evaluate(
    "config.toml", set=["run.directory=whole"], step=4
).validation_loss
dumped = gt.dump(
    "config.toml", "dumped", set=["run.directory=whole"], step=3, steps=5, arrays=["embedding"],
    compile=True,
)
results["dumped"] = [
    [number, *(float(dumped.arrays(number).read(f"metrics/{name}")) for name in NAMES),
     list(dumped.arrays(number).read("forward/embedding").shape)]
    for number in (entry["step"] for entry in dumped.index.steps)
]
Path("results.json").write_text(json.dumps(results))
"""


@pytest.fixture
def place(tmp_path: Path, corpus: Path, compiled_quickly: None) -> Place:
    """A directory with a run of three phases, and a store without programs."""
    furnish(tmp_path, corpus)
    text = CONFIG
    for old, new in CHANGES.items():
        assert CONFIG.count(old) == 1, old
        text = text.replace(old, new)
    (tmp_path / "config.toml").write_text(text)
    return Place(tmp_path, tmp_path / "cache")


def test_phases_compile_nothing_and_equal_programs_in_a_row(place):
    process = place.start_python("-c", SCRIPT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    results = json.loads((place.path / "results.json").read_text())
    assert results["labels"] == [
        "phase 1 init", "phase 1 train", "phase 1 evaluate", "phase 2 train", "phase 2 evaluate",
        "train", "evaluate",
    ]  # fmt: skip
    assert results["events"] == []

    curve = place.curve("whole")
    assert [step for step, *_ in curve] == list(range(1, 11))
    targets = [one["targets"] for one in place.journal("whole") if "loss" in one]
    assert targets == [4 * 32] * 4 + [8 * 32] * 3 + [4 * 64] * 3
    for step in (2, 4, 8):
        assert results[f"killed-{step}"] == step
        assert place.curve(f"killed-{step}") == curve, f"killed after step {step}"

    assert place.curve("hand") == curve
    assert "program.model.rope_theta was 10000.0 and is 40000.0" in results["refused theta"]
    assert "program.phase was [" in results["refused phases"]

    # An evaluation has the program of the phase that made the checkpoint.
    (early, *_) = [one for one in place.journal("whole") if "validation_loss" in one]
    assert (early["step"], early["validation_loss"]) == (4, results["evaluation"])
    check_kills_where_phases_begin(place, curve)

    # A dump of the steps of three phases, each with its own shapes.
    assert [tuple(row[:3]) for row in results["dumped"]] == [
        (step, pytest.approx(loss, rel=1e-5), pytest.approx(norm, rel=1e-5))
        for step, loss, norm in curve[3:8]
    ]
    shapes = [row[3] for row in results["dumped"]]
    assert shapes == [[4, 32, 32], *[[8, 32, 32]] * 3, [4, 64, 32]]


KILLED = """
import os, signal, sys

import graphtrain as gt


class Kill:
    def on_step(self, step, metrics):
        if step == int(sys.argv[1]):
            os.kill(os.getpid(), signal.SIGKILL)


print(gt.train("config.toml", callbacks=[Kill()]).resumed_from)
"""


def check_kills_where_phases_begin(place: Place, curve: list) -> None:
    """SIGKILL with the last step of each phase, while the first one of the next is computed."""
    for step in ("4", "7"):
        process = place.start_python("-c", KILLED, step)
        _, err = process.communicate(timeout=120)
        assert process.returncode == -signal.SIGKILL, err
    process = place.start_python("-c", KILLED, "0")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert 1 <= int(out) <= 7  # the last checkpoints may not have been complete
    assert place.curve() == curve


def test_a_plan_and_the_cache_name_every_phase(place):
    out, _ = place.command("plan", "config.toml", "--no-compile")
    lines = [line.split() for line in out.splitlines()]
    assert [line[1:7] for line in lines if line and line[0] in ("1", "2", "3")] == [
        ["1", "to", "4", "4", "32", "1"],
        ["5", "to", "7", "8", "32", "2"],
        ["8", "to", "the", "last", "4", "64"],
    ]
    out, _ = place.command("cache", "explain", "config.toml")
    assert "phase 2 train" in out and "phase 1 init" in out
