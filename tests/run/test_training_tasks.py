"""Scores of a run in training: those of evaluate, in a run that is the same without them."""

import json
from pathlib import Path

import pytest
from places import CUBE, Place, furnish, meeting_address

QUESTIONS = [
    {"passage": f"A stone is not a {word}.", "question": f"is a stone a {word}", "label": label}
    for label, word in enumerate(["river", "stone"])
]
SMALL = [
    *CUBE, "--set", "program.serve.prefill=[64]", "--set", "program.serve.slots=4",
    "--set", "program.serve.context_length=128",
]  # fmt: skip
EVERY = ["--set", "run.steps=4", "--set", "run.evaluate_every=4"]
TASKS = [
    "--set", 'run.tasks.names=["boolq"]', "--set", 'run.tasks.data="tasks"',
    "--set", "run.tasks.every=2", "--set", "run.checkpoints.local_every=2",
]  # fmt: skip


@pytest.fixture
def asked(place: Place) -> Place:
    """A place with the data of a task."""
    write_questions(place)
    return place


def write_questions(place: Place) -> None:
    (place.path / "tasks" / "boolq").mkdir(parents=True)
    rows = "".join(f"{json.dumps(one)}\n" for one in QUESTIONS)
    (place.path / "tasks" / "boolq" / "validation.jsonl").write_text(rows)


def scores(place: Place) -> list[tuple[int, float]]:
    return [(one["step"], one["boolq/acc"]) for one in place.journal() if "boolq/acc" in one]


def test_a_run_is_the_same_with_tasks_and_repeats_scores_that_were_given_up(asked: Place):
    asked.command("run", "config.toml", *SMALL, *EVERY, "--set", "run.directory=without")
    words = "config.toml", *SMALL, *EVERY, *TASKS
    _, missing = asked.command("run", *words, status=3)
    assert "no compiled serve_init" in missing and "run: graphtrain compile" in missing
    asked.command("compile", *words)
    _, err = asked.command("run", *words)
    assert "step 4/4  boolq/acc " in err and "warning" not in err
    assert asked.curve() == asked.curve("without")
    whole = asked.journal()
    assert [step for step, _ in scores(asked)] == [2, 4]
    (events,) = (asked.path / "run" / "tensorboard").iterdir()
    assert events.read_bytes().count(b"boolq/acc") == 2

    out, _ = asked.command("evaluate", "run", "--tasks", "boolq", "--data", "tasks", "--json")
    result = json.loads(out)["results"]["boolq"]
    assert scores(asked)[-1] == (4, pytest.approx(result["acc,none"]))

    words_of_curve = ["evaluate", "run", "--steps", "all", "--json"]
    of_tasks = ["--tasks", "boolq", "--data", "tasks", "--plot", "curve.svg"]
    out, err = asked.command(*words_of_curve, *of_tasks)
    curve = [(one["step"], one["metrics"]["boolq/acc"]) for one in json.loads(out)]
    assert curve == [(step, pytest.approx(score)) for step, score in scores(asked)]
    assert err.count("step 2") == 1 and "answers of an earlier evaluation" not in err
    assert b"boolq/acc" in (asked.path / "curve.svg").read_bytes()
    out, _ = asked.command(*words_of_curve)
    losses = {one["step"]: one["metrics"]["validation_loss"] for one in json.loads(out)}
    (recorded,) = (one["validation_loss"] for one in whole if "validation_loss" in one)
    assert losses.keys() == {2, 4} and losses[4] == pytest.approx(recorded)
    out, _ = asked.command("evaluate", "run", "--steps", "2,4")
    assert out.splitlines()[0].split() == ["step", "validation_loss"] and "┤" in out
    _, err = asked.command("evaluate", "run", "--steps", "3", status=2)
    assert "no checkpoint of step 3 in run/checkpoints; available steps: 2, 4" in err

    # As of a run that a signal ended in the last evaluation.
    file = asked.path / "run" / "metrics.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    asked.command("run", *words)
    assert asked.journal() == whole


SHORT = {
    "task": "short", "dataset_path": "json", "output_type": "generate_until",
    "test_split": "test", "doc_to_text": "{{question}}", "doc_to_target": "{{question}}",
    "generation_kwargs": {"until": ["x"], "max_gen_toks": 12, "do_sample": False},
    "metric_list": [{"metric": "exact_match"}],
    "dataset_kwargs": {"data_files": {"test": "tasks/boolq/validation.jsonl"}},
}  # fmt: skip


def test_two_processes_score_and_generate_what_one_does(
    tmp_path: Path, corpus: Path, compiled_quickly: None
):
    furnish(tmp_path / "here", corpus)
    place = Place(tmp_path / "here", tmp_path / "cache")
    write_questions(place)
    (place.path / "short.yaml").write_text(json.dumps(SHORT))
    once = ["--set", "run.steps=2", "--set", "run.evaluate_batches=1", *TASKS]
    one_layer = ["--set", "program.model.layers=1", "--set", "program.mesh.fsdp=2"]
    two = ["config.toml", "--target", "cpu:2x1", *SMALL[8:], *one_layer, *once]
    place.command("compile", *two)
    told = of_both(place, "run", *two)
    assert "step 2/2  boolq/acc " in told[0] and "boolq/acc" not in told[1]

    words = ["--tasks", "boolq,short.yaml", "--data", "tasks", "--report", "two.json", "--samples"]
    told = of_both(place, "evaluate", "run", *words, "two.jsonl")
    assert "boolq" in told[0] and "boolq" not in told[1]
    report = json.loads((place.path / "two.json").read_text())
    assert scores(place) == [(2, report["results"]["boolq"]["acc,none"])]
    place.command("compile", "run", "--target", "cpu:2", "--for", "evaluate")
    words = [*words[:4], "--samples"]
    place.command("evaluate", "run", "--target", "cpu:2", *words, "one.jsonl")
    assert (place.path / "two.jsonl").read_bytes() == (place.path / "one.jsonl").read_bytes()


def of_both(place: Place, *words: str) -> list[str]:
    """What two processes of a command print."""
    options = ["--coordinator", meeting_address(), "--processes", "2", "--rank"]
    both = [place.start(*words, *options, str(rank)) for rank in (0, 1)]
    told = ["".join(process.communicate(timeout=200)) for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    return told
