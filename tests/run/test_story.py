"""The story of examples/story, as a user would run it."""

import json
import os
import subprocess
import sys
from pathlib import Path

from places import ROOT


def validation_losses(directory: Path) -> list[float]:
    records = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return [record["validation_loss"] for record in records if "validation_loss" in record]


def test_a_checkpoint_is_trained_on_text_and_instructions_and_answers_in_transformers(tmp_path):
    commands = tmp_path / "commands"
    commands.mkdir()
    for name, words in ("python", ""), ("graphtrain", "-m graphtrain"):
        (commands / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        (commands / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "GRAPHTRAIN_CACHE": str(tmp_path / "cache"),
    }
    command = [ROOT / "examples/story/story.sh", tmp_path / "work"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    first, last = validation_losses(tmp_path / "work/runs/text")
    assert last < first < 6.93  # log 1024
    first, last = validation_losses(tmp_path / "work/runs/chat")
    assert last < first
    assert (tmp_path / "work/better/chat_template.jinja").exists()
    assert "What does os.path.join do?\n" in ended.stdout
