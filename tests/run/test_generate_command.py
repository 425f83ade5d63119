"""The command generate over prompts of a file, as a stream and with beams."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from places import Place
from unoptimized import XLA_FLAGS

from graphtrain.run.directory_lock import locked_run_directory

SMALL = ["--set", "program.serve.prefill=[32]", "--set", "program.serve.slots=4"]
PROMPTS = ["def ", {"prompt": "import os\nimport ", "id": 3}, "x"]


def lines_of(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def test_prompts_of_a_file_a_stream_and_beams(place: Place, monkeypatch):
    place.command("run", "config.toml", "--set", "run.steps=2")
    monkeypatch.setenv("XLA_FLAGS", XLA_FLAGS)  # compiled quickly
    place.command("compile", "config.toml", "--for", "batch", *SMALL)
    (place.path / "prompts.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in PROMPTS))
    words = "generate", "config.toml", *SMALL, "--tokens", "9", "--temperature", "1", "--seed", "3"

    out, err = place.command(*words, "--prompts", "prompts.jsonl")
    assert "compil" not in err
    each = lines_of(out)
    assert [one["finish_reason"] for one in each] == ["length"] * 3
    text, _ = place.command(*words, "def ")
    assert text == f"def {each[0]['text']}\n"
    assert place.command(*words, "def ", "--stream")[0] == text

    best = [*words, "--prompts", "prompts.jsonl", "--samples", "3"]
    assert place.command(*best, "--output", "out.jsonl")[0] == ""
    for one, line in zip(each, lines_of((place.path / "out.jsonl").read_text()), strict=True):
        samples = line.pop("samples")
        assert len({sample["text"] for sample in samples}) == 3 and samples[0] == line
        log_probs = [sample["log_prob"] for sample in samples]
        assert log_probs == sorted(log_probs, reverse=True)
        assert one["text"] in {sample["text"] for sample in samples}  # that of the first seed
    _, err = place.command(*best, "--output", "out.jsonl", status=2)
    assert "out.jsonl exists already" in err

    _, err = place.command(*words, "--prompts", "config.toml", status=2)
    assert "config.toml:1: not JSON" in err
    out, _ = place.command(
        "generate", "config.toml", *SMALL, "def ", "--beams", "2", "--tokens", "9", "--json"
    )
    assert len(json.loads(out)["tokens"]) == 9
    beams = ["generate", "config.toml", *SMALL, "--prompts", "prompts.jsonl", "--beams", "2"]
    each = lines_of(place.command(*beams, "--tokens", "9", "--samples", "2")[0])
    assert len(each) == 3 and each[0]["tokens"] == json.loads(out)["tokens"]
    for line in each:
        scores = [sample["log_prob"] for sample in line["samples"]]
        assert len(scores) == 2 and scores == sorted(scores, reverse=True)
    _, err = place.command(*beams, "--samples", "3", status=2)
    assert "--samples 3 is more than --beams 2 finds" in err

    check_standard_input(place)
    check_interrupt(place)


def check_standard_input(place: Place) -> None:
    words = [sys.executable, "-m", "graphtrain", "generate", "config.toml", *SMALL]
    done = subprocess.run(
        [*words, "--prompts", "-", "--tokens", "2"], input='"a"\n"b"\n', text=True,
        cwd=place.path, env=place.environment(), capture_output=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0 and len(lines_of(done.stdout)) == 2, done.stderr


def check_interrupt(place: Place) -> None:
    with place.start("generate", "config.toml", *SMALL, "a", "--tokens", "9999999",
                     "--stream") as process:  # fmt: skip
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(40).startswith("a")
        process.send_signal(signal.SIGINT)
        rest, err = process.stdout.read(), process.stderr.read()
    assert (process.returncode, err) == (128 + signal.SIGINT, "")
    assert rest.endswith("\n")


def test_new_checkpoints_of_a_run_are_answered_until_it_ends(place: Place, monkeypatch):
    place.command("run", "config.toml", "--set", "run.steps=8")
    monkeypatch.setenv("XLA_FLAGS", XLA_FLAGS)  # compiled quickly
    (place.path / "prompts.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in PROMPTS))
    words = ["generate", "run", *SMALL, "--tokens", "5", "--seed", "3"]
    of_file, out = [*words, "--prompts", "prompts.jsonl"], place.path / "out.jsonl"
    expected = {step: lines_of(place.command(*of_file, "--step", str(step))[0]) for step in (4, 8)}
    checkpoints, later = place.path / "run" / "checkpoints", place.path / "8"
    (checkpoints / "8").rename(later)
    shutil.copytree(later, place.path / "6")  # not what step 6 would have saved
    out.write_text('{"step": 2, "te')  # of a watch that was killed
    with place.start(*of_file, "--watch", "--output", "out.jsonl") as process:
        with locked_run_directory(place.path / "run"):  # as by a process that trains the run
            wait_for_lines(process, out, 4)
            (place.path / "6").rename(checkpoints / "6")
            assert process.stderr is not None
            said = process.stderr.readline()
            assert said.startswith("no answers of step 6: run/checkpoints/6 is damaged"), said
            later.rename(checkpoints / "8")
            wait_for_lines(process, out, 7)
            check_end_by_signal(place, [*words, "def ", "--watch"], expected[8][0]["text"])
        assert process.stderr.read() == "the run has ended\n"
    assert process.returncode == 0
    half, *lines = out.read_text().splitlines()
    assert half == '{"step": 2, "te'
    assert [*map(json.loads, lines)] == [
        {"step": step} | line for step in (4, 8) for line in expected[step]
    ]

    shutil.rmtree(checkpoints)
    _, err = place.command(*of_file, "--watch", status=2)
    assert "no checkpoint in run/checkpoints, and no process trains this run" in err


def wait_for_lines(process: subprocess.Popen[str], path: Path, count: int) -> None:
    while path.read_bytes().count(b"\n") < count:
        assert process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.05)


def check_end_by_signal(place: Place, words: list[str], text: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        with place.start(*words) as process:
            assert process.stdout is not None and process.stderr is not None
            expected = f"step 8: def {text}\n"
            assert process.stdout.read(len(expected)) == expected
            process.send_signal(number)
            assert process.wait(60) == 0 and process.stderr.read() == ""
