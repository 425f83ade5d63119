"""The main job, from text to generated text, by the command in processes of its own."""

import json
import signal

from places import CONFIG, Place
from test_interruptions import begin_and_signal

TWO_DEVICES = ["--target", "cpu:2", "--set", "run.steps=60"]


def test_from_text_through_a_killed_run_to_generated_text(tmp_path):
    place = Place(tmp_path, tmp_path / "cache")
    (tmp_path / "config.toml").write_text(CONFIG)
    place.command("data", "sample", "text.jsonl", "--megabytes", "0.3")
    words = ["--output", "data", "--tokenizer", "bytes", "--validation", "0.1"]
    place.command("data", "prepare", "text.jsonl", *words)

    out, _ = place.command("plan", "config.toml", *TWO_DEVICES)
    assert "cpu:2" in out and "embedding" in out
    _, err = place.command("run", "config.toml", *TWO_DEVICES, status=3)
    assert "graphtrain compile config.toml --target cpu:2" in err
    place.command("compile", "config.toml", *TWO_DEVICES, "--report", "report.json")
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["successful"], report["cached"]) == (2, 1)  # plan compiled the training step

    place.command("run", "config.toml", *TWO_DEVICES, "--set", "run.directory=whole")
    _, status = begin_and_signal(place, signal.SIGKILL, *TWO_DEVICES)
    assert status == -signal.SIGKILL and len(place.curve()) < 60
    place.command("run", "config.toml", *TWO_DEVICES)
    assert place.curve() == place.curve("whole")
    assert place.curve()[-1][1] < place.curve()[0][1] - 1

    out, _ = place.command("evaluate", "config.toml", *TWO_DEVICES, "--bigram", "--json")
    result = json.loads(out)
    assert result["step"] == 60 and result["bigram_loss"] > 0
    assert result["validation_loss"] == place.journal()[-1]["validation_loss"]
    out, _ = place.command("generate", "run", "def ", "--tokens", "9", "--json")
    result = json.loads(out)
    assert len(result["tokens"]) == 9 and result["prompt"] == list(b"def ")
