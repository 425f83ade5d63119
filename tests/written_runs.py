"""Files of a run without the run, for what only reads them."""

import json
from pathlib import Path
from typing import Any

from graphtrain.checkpoints.manifest import write_manifest

CONFIG = """
[program]
target = "v5e:1x1"
model = { layers = 2, embed = 256, heads = 4, mlp = 512, vocab = 512 }
batch = { global_batch_size = 8, seq_len = 128 }

[run]
directory = "run"
steps = 100
data = { train = "data" }
"""


def records(first: int, last: int) -> list[dict[str, Any]]:
    """Return a record for each step; the loss is 1 / step."""
    return [
        {
            "step": step,
            "loss": 1 / step,
            "grad_norm": None if step == 2 else 1.0,
            "learning_rate": 0.1,
            "step_seconds": 0.25,
            "tokens_per_second": 4096.0,
            "memory_bytes": 1000000000 + step,
        }
        for step in range(first, last + 1)
    ]


def append(directory: Path, lines: list[dict[str, Any]], name: str = "metrics.jsonl") -> None:
    """Append lines to a file of a run, and its directory if there is none."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / name).open("a") as file:
        file.writelines(f"{json.dumps(line)}\n" for line in lines)


def write_goodput(directory: Path, outcome: str | None) -> None:
    """Write one start of 10 s, of which 5 s are steps; None: it was killed."""
    fields: list[dict[str, Any]] = [
        {"at": 1e9, "event": "start", "host": "<b>host</b>", "pid": 1},
        {"at": 1e9 + 5, "activity": "prepare", "seconds": 5.0, "step": 0},
        {"at": 1e9 + 5, "event": "begin", "step": 0, "compile_seconds": {}, "target": "v5e:1x1"},
        {"at": 1e9 + 10, "activity": "step", "seconds": 5.0, "step": 20, "steps": 20},
    ]
    if outcome is not None:
        fields.append({"at": 1e9 + 10, "event": "end", "outcome": outcome})
    append(directory, [{"process": "a", **line} for line in fields], "goodput.jsonl")


def write_checkpoint(directory: Path, step: int) -> Path:
    """Write a checkpoint whose files are whole, with a validation loss of 1 / step."""
    path = directory / "checkpoints" / str(step)
    (path / "about").mkdir(parents=True)
    about = {"loader": {"epoch": 0, "step": step}, "arrays": {}, "validation_loss": 1 / step}
    (path / "about" / "metadata").write_text(json.dumps(about))
    write_manifest(path)
    return path
