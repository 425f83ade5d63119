"""A NaN, a spike and a bad document, each with all three policies: stop, skip and rewind."""

import json
from pathlib import Path

import numpy as np
import pytest
from places import CONFIG, Place, furnish
from unoptimized import XLA_FLAGS

from graphtrain.checkpoints.info import read_checkpoint_info
from graphtrain.checkpoints.private_orbax import open_array

CHANGES = {
    "layers = 2": "layers = 1",
    "global_batch_size = 8": "global_batch_size = 4",
    "steps = 16": "steps = 12",
    "local_every = 4": "local_every = 3\nkeep = 99",
    'validation = "data/validation"\n': "",
    "warmup_steps = 2": 'schedule = "constant"',
}
# Batch 8, counted from 0, is made bad in the loader, wherever in the run it comes; step 9 meets it
# first. The document 77 is bad in the data itself. One process for all runs, whose start takes
# longer than they do.
SCRIPT = r"""
import json, shutil, warnings
from pathlib import Path

import numpy as np
from jax import monitoring

import graphtrain as gt
from graphtrain.data.batches.loader import Loader
from graphtrain.data.indexed.writer import IndexedWriter

random = np.random.default_rng(0)
with IndexedWriter("documents", 264) as writer:
    for number in range(80):
        tokens = np.arange(number, number + 33) % 7
        writer.append(random.integers(0, 264, 33) if number == 77 else tokens)
DOCUMENTS = [
    "run.data.train=documents", "run.data.packing=pad", "run.seed=3",
    "run.learning_rate.peak=3e-2", "run.spikes.loss_zscore=4",
]
BAD, LEAVE_OUT, BAD_SAMPLES, LEFT_OUT_SAMPLES = {}, [], {}, []
read = Loader._batch
def samples_of(self, step, numbers, original=Loader._samples_of):
    first = self._first_sample(step)
    for begin, end in LEFT_OUT_SAMPLES:
        if first >= begin:
            return np.stack([self._samples[first + end - begin + int(one)] for one in numbers])
    for left_out in LEAVE_OUT:  # the reference: batches that were never in the data
        step += step >= left_out
    return original(self, step, numbers)
Loader._samples_of = samples_of
def batch(self, step, selection):
    made = {name: array.copy() for name, array in read(self, step, selection).items()}
    number = self._first_sample(step) // self._samples_per_batch
    if number in BAD:
        made["weights"][0, :2] = BAD[number]
    first = self._first_sample(step)
    for row, sample in enumerate(range(first, first + self._samples_per_batch)):
        if sample in BAD_SAMPLES:
            made["weights"][row, :2] = BAD_SAMPLES[sample]
    return made
Loader._batch = batch

LIMITS = ["run.spikes.loss_zscore=8", "run.spikes.window=4", "run.spikes.grad_norm=50"]
SKIPS = "program.optimizer.skip_spikes=true"
gt.compile("config.toml")
gt.compile("config.toml", set=[SKIPS])
PHASES = "program.phase=[{until = 4, global_batch_size = 2}]"
gt.compile("config.toml", set=[PHASES])
events, results = [], {}
monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: events.append(event) if "/compile/" in event else None
)
def train(name, policy, *settings):
    words = [f"run.directory={name}", f"run.spikes.on_spike={policy}", *settings]
    words += [SKIPS] if policy == "skip" else []
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        try:
            return gt.train("config.toml", set=[*LIMITS, *words]).resumed_from
        except gt.UserError as error:
            results[name] = str(error)
CASES = {"nan": ((3e38, -3e38), []), "spike": ((1e4, -1e4), []), "document": (None, DOCUMENTS)}
for case, (bad, settings) in CASES.items():
    BAD.update({} if bad is None else {8: bad})
    for policy in ("stop", "skip", "rewind"):
        results[f"{case} {policy} resumed"] = train(f"{case}-{policy}", policy, *settings)
    # Killed after the rewind, before the next checkpoint.
    (record,) = map(json.loads, Path(f"{case}-rewind", "spikes.jsonl").read_text().splitlines())
    shutil.copytree(f"{case}-rewind", f"{case}-killed")
    for saved in Path(f"{case}-killed", "checkpoints").iterdir():
        if saved.name.isdigit() and int(saved.name) > record["checkpoint"]:
            shutil.rmtree(saved)
    results[f"{case} killed resumed"] = train(f"{case}-killed", "rewind", *settings)
    BAD.clear()
    LEAVE_OUT[:] = range(record["checkpoint"], record["step"])
    train(f"{case}-reference", "stop", *settings)
    LEAVE_OUT.clear()
for case, (bad, settings) in CASES.items():
    BAD.update({} if bad is None else {8: bad})
    train(f"{case}-limit", "skip", "run.checkpoints.local_every=1", *settings)
    BAD.clear()
BAD[8] = CASES["spike"][0]
BAD.update({number: BAD[8] for number in range(5, 12)})
train("many-skip", "skip", "run.spikes.max_consecutive=2")
train("many-rewind", "rewind", "run.spikes.max_consecutive=1")
BAD.clear()
BAD_SAMPLES[9] = CASES["spike"][0]  # in step 5, the first of the second phase
train("phases-rewind", "rewind", PHASES)
BAD_SAMPLES.clear()
(record,) = map(json.loads, Path("phases-rewind", "spikes.jsonl").read_text().splitlines())
LEFT_OUT_SAMPLES.append((2 * record["checkpoint"], record["data"]["sample"]))
train("phases-reference", "stop", PHASES)
results["events"] = events
Path("results.json").write_text(json.dumps(results))
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> tuple[Place, dict]:
    """All runs of the script, and what it found."""
    path = tmp_path_factory.mktemp("spikes")
    furnish(path, corpus)
    text = CONFIG
    for old, new in CHANGES.items():
        assert CONFIG.count(old) == 1, old
        text = text.replace(old, new)
    (path / "config.toml").write_text(text)
    place = Place(path, path / "cache")
    quickly = f"import os; os.environ['XLA_FLAGS'] = {XLA_FLAGS!r}"
    process = place.start_python("-c", f"{quickly}\n{SCRIPT}")
    _, err = process.communicate(timeout=500)
    assert process.returncode == 0, err
    return place, json.loads((path / "results.json").read_text())


def records(place: Place, run: str) -> list[dict]:
    lines = (place.path / run / "spikes.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def state(place: Place, run: str, step: int) -> dict:
    """The arrays of a checkpoint that are trained, by name."""
    directory = place.path / run / "checkpoints"
    names = [name for name in read_checkpoint_info(directory, step).arrays if "/" in name]
    return {name: open_array(directory / str(step), name)[...].read().result() for name in names}


def assert_equal(first: dict, second: dict) -> None:
    assert first.keys() == second.keys()
    for name, array in first.items():
        assert np.array_equal(array, second[name]), name


CASES = ["nan", "spike", "document"]


@pytest.mark.parametrize("case", CASES)
def test_stop_ends_the_run_and_names_the_documents(runs, case):
    place, results = runs
    (record,) = records(place, f"{case}-stop")
    message = results[f"{case}-stop"]
    assert f"step {record['step']}: loss" in message
    assert ("above run.spikes (loss" in message) == (case != "nan")
    ((_, documents),) = record["documents"].items()
    assert f"documents {documents[0]}" in message
    if case == "document":
        assert 77 in documents
    else:
        assert record["step"] == 9
    saved = [int(one.name) for one in (place.path / f"{case}-stop/checkpoints").glob("[0-9]*")]
    assert max(saved) == (record["step"] - 1) // 3 * 3  # its state is never saved


@pytest.mark.parametrize("case", CASES)
def test_skip_writes_down_the_documents_and_goes_on(runs, case):
    place, results = runs
    assert f"{case}-skip" not in results  # no error
    (record,) = records(place, f"{case}-skip")
    (stopped,) = records(place, f"{case}-stop")
    for name in ("loss", "grad_norm", "loss_limit"):  # of another program, which rounds otherwise
        value, expected = record.pop(name), stopped.pop(name)
        assert value == (None if expected is None else pytest.approx(expected, rel=1e-3))
    assert record == stopped | {"on_spike": "skip"}
    steps = {one["step"]: one["spike"] for one in place.journal(f"{case}-skip")}
    assert steps == {step: int(step == record["step"]) for step in range(1, 13)}


@pytest.mark.parametrize("case", CASES)
def test_a_skipped_step_keeps_the_old_state_bit_for_bit(runs, case):
    place, _ = runs
    (record,) = records(place, f"{case}-limit")
    step = record["step"]
    before, skipped = (state(place, f"{case}-limit", number) for number in (step - 1, step))
    assert_equal(before, skipped)
    if case != "document":  # whose spike is the last step
        after = state(place, f"{case}-limit", step + 1)
        assert not any(np.array_equal(skipped[name], after[name]) for name in after)


@pytest.mark.parametrize("case", CASES)
def test_rewind_equals_a_run_whose_data_never_had_the_batches(runs, case):
    place, results = runs
    (record,) = records(place, f"{case}-rewind")
    assert (
        results[f"{case} rewind resumed"] == record["checkpoint"] == (record["step"] - 1) // 3 * 3
    )
    assert place.curve(f"{case}-rewind") == place.curve(f"{case}-reference")
    assert_equal(state(place, f"{case}-rewind", 12), state(place, f"{case}-reference", 12))


@pytest.mark.parametrize("case", CASES)
def test_a_run_that_is_started_again_leaves_the_same_batches_out(runs, case):
    place, results = runs
    assert len(records(place, f"{case}-killed")) == 1  # no spike was met again
    assert results[f"{case} killed resumed"] == records(place, f"{case}-rewind")[0]["checkpoint"]
    assert place.curve(f"{case}-killed") == place.curve(f"{case}-reference")


def test_a_rewind_to_an_earlier_phase_leaves_the_same_batches_out(runs):
    place, _ = runs
    (record,) = records(place, "phases-rewind")
    assert (record["step"], record["checkpoint"]) == (5, 3)  # the second phase begins at step 5
    assert place.curve("phases-rewind") == place.curve("phases-reference")
    assert_equal(state(place, "phases-rewind", 12), state(place, "phases-reference", 12))


def test_a_run_stops_when_nothing_helps_any_more(runs):
    place, results = runs
    assert "; 2 skipped steps in a row did not help" in results["many-skip"]
    assert [one["on_spike"] for one in records(place, "many-skip")] == ["skip", "skip", "stop"]
    assert "; 1 rewind did not help" in results["many-rewind"]
    assert [one["on_spike"] for one in records(place, "many-rewind")] == ["rewind", "stop"]


def test_limits_are_inputs_and_nothing_is_compiled_while_a_run_trains(runs):
    assert runs[1]["events"] == []
