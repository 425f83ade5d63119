"""Validation losses of the quickstart under other settings, each in a run of its own."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from measuring import ENVIRONMENT, ROOT

_EXAMPLE = str(ROOT / "examples/quickstart.toml")


class Quickstart:
    """The quickstart's data in a folder, and runs of its configuration there."""

    def __init__(self, folder: str) -> None:
        """Prepare the data."""
        self._folder = folder
        self._graphtrain("data", "sample", "text.jsonl")
        prepare = "data", "prepare", "text.jsonl", "--output", "data/quickstart"
        self._graphtrain(*prepare, "--tokenizer", "sentencepiece:4096")

    def compile(self, settings: Sequence[str]) -> None:
        """Compile the programs of a run with "section.name=value" settings."""
        self._graphtrain("compile", _EXAMPLE, *_set(settings))

    def loss(self, name: str, settings: Sequence[str]) -> float:
        """Train with settings, and return the validation loss after the last step."""
        words = _set([*settings, f"run.directory={name}"])
        self._graphtrain("run", _EXAMPLE, *words)
        lines = (Path(self._folder) / name / "metrics.jsonl").read_text().splitlines()
        measured = [json.loads(line).get("validation_loss") for line in lines]
        loss = [one for one in measured if one is not None][-1]
        print(f"{name}: validation loss {loss:.4f}", file=sys.stderr)
        return loss

    def _graphtrain(self, *words: str) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "graphtrain", *words],
            cwd=self._folder,
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            sys.exit(f"graphtrain {' '.join(words)}\n{done.stderr}")


def _set(settings: Sequence[str]) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]
