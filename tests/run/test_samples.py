"""Samples of a run in training: continued prompts, and a run that is the same without them."""

import json

import pytest
from places import CUBE, STAGES, Place

SMALL = ["--set", "program.serve.prefill=[32]", "--set", "program.serve.slots=4"]
EVERY = ["--set", "run.steps=8", "--set", "run.evaluate_every=4"]
SAMPLES = [
    *SMALL, "--set", 'run.samples.prompts="prompts.jsonl"', "--set", "run.samples.tokens=6",
    "--set", "run.samples.temperature=0",
]  # fmt: skip
PROMPTS = ["def ", {"prompt": "import "}]
ADAPTER = [
    "--set", "program.adapter.rank=2", "--set", "program.adapter.alpha=8", "--set",
    "run.init_from=run", "--set", "run.directory=adapted",
]  # fmt: skip


@pytest.fixture
def asked(place: Place) -> Place:
    """A place with prompts."""
    (place.path / "prompts.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in PROMPTS))
    return place


def samples_of(place: Place, directory: str = "run") -> list[dict]:
    lines = (place.path / directory / "samples.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def check_last(place: Place, directory: str) -> None:
    """Compare the last samples of a run with what generate writes with its last checkpoint."""
    out, _ = place.command("generate", directory, *SMALL, "--prompts", "prompts.jsonl",
                           "--tokens", "6", "--temperature", "0")  # fmt: skip
    expected = [json.loads(line) for line in out.splitlines()]
    last = samples_of(place, directory)[-len(expected) :]
    assert [one["text"] for one in last] == [one["text"] for one in expected]
    log_probs = [one["log_prob"] for one in expected]
    assert [one["log_prob"] for one in last] == pytest.approx(log_probs, abs=1e-4)


def test_a_run_is_the_same_with_samples_and_resumes_them(asked: Place):
    asked.command("run", "config.toml", *EVERY, "--set", "run.directory=without")
    _, missing = asked.command("run", "config.toml", *EVERY, *SAMPLES, status=3)
    assert "no compiled serve_init" in missing and "run: graphtrain compile" in missing
    asked.command("compile", "config.toml", *EVERY, *SAMPLES)
    asked.command("run", "config.toml", *EVERY, *SAMPLES)
    assert asked.curve() == asked.curve("without")
    validation = [one.get("validation_loss") for one in asked.journal()]
    assert validation == [one.get("validation_loss") for one in asked.journal("without")]

    lines = samples_of(asked)
    assert [(one["step"], one["prompt"]) for one in lines] == [
        (4, "def "), (4, "import "), (8, "def "), (8, "import "),
    ]  # fmt: skip
    check_last(asked, "run")
    (events,) = (asked.path / "run" / "tensorboard").iterdir()
    assert events.read_bytes().count(b"sample_1/text_summary") == 2

    # Of a run that was killed after step 12: these steps are redone.
    with (asked.path / "run" / "samples.jsonl").open("a") as file:
        file.write('{"step": 12, "prompt": "def ", "text": "?"}\n{"step": 12, "pro')
    asked.command("run", "config.toml", *EVERY, *SAMPLES, "--set", "run.steps=16")
    again = samples_of(asked)
    assert again[:4] == lines and [one["step"] for one in again[4:]] == [12, 12, 16, 16]
    assert "?" not in {one["text"] for one in again}


def test_the_weights_of_a_mesh_are_those_of_its_checkpoint(asked: Place):
    for mesh in (CUBE, STAGES):
        directory = "cube" if mesh is CUBE else "stages"
        words = "config.toml", *mesh, *EVERY, *SAMPLES, "--set", f"run.directory={directory}"
        asked.command("compile", *words)
        asked.command("run", *words)
        check_last(asked, directory)


def test_an_adapter_is_merged_and_a_failure_does_not_end_the_run(asked: Place):
    asked.command("run", "config.toml", "--set", "run.steps=4")
    words = "config.toml", *EVERY, *SAMPLES, *ADAPTER
    asked.command("compile", *words)
    asked.command("run", *words)
    check_last(asked, "adapted")

    (asked.path / "adapted" / "samples.jsonl").unlink()
    (asked.path / "adapted" / "samples.jsonl").mkdir()
    _, err = asked.command("run", *words, "--set", "run.steps=12")
    assert "warning: no samples of step 12: [Errno 21] Is a directory" in err
    assert asked.curve("adapted")[-1][0] == 12
