"""The real command in processes of its own, on a model that compiles in seconds."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

CONFIG = """# A model of 2 layers on bytes.

[program]
target = "cpu:1"

[program.mesh]
data = "rest"

[program.model]
layers = 2
embed = 32
heads = 4
kv_heads = 2
mlp = 48
vocab = 264
dtype = "float32"
remat = "none"

[program.batch]
global_batch_size = 8
seq_len = 32

[run]
directory = "run"
steps = 16
report_every = 1

[run.checkpoints]
local_every = 4

[run.data]
train = "data/train"
validation = "data/validation"

[run.learning_rate]
peak = 1e-2
warmup_steps = 2
"""

CUBE = [
    "--target", "cpu:8", "--set", "program.mesh.data=2", "--set", "program.mesh.fsdp=2",
    "--set", "program.mesh.tensor=2",
]  # fmt: skip

STAGES = [
    "--target", "cpu:8", "--set", "program.mesh.data=2", "--set", "program.mesh.stage=2",
    "--set", "program.mesh.tensor=2", "--set", "program.batch.microbatches=2",
]  # fmt: skip


# How lines of a run on stderr begin that are no messages.
PROGRESS = "step ", "model: ", "batch: ", "data: ", "machine: ", "directory: "

# The command, whose data loader never returns the sixth batch.
BLOCKED_LOADER = """
import sys, threading
from graphtrain.data.batches import loader
read, calls = loader.Loader.__next__, []

def block(self):
    calls.append(None)
    if len(calls) == 6:
        threading.Event().wait()
    return read(self)

loader.Loader.__next__ = block
from graphtrain.cli import main
main()
"""


@dataclass(frozen=True)
class Place:
    """A directory with a configuration and data, and a store it may share with others."""

    path: Path
    cache: Path

    def environment(self) -> dict[str, str]:
        return os.environ | {"PYTHONPATH": str(ROOT), "GRAPHTRAIN_CACHE": str(self.cache)}

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Begin `graphtrain WORDS`."""
        return self.start_python("-m", "graphtrain", *words)

    def start_python(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *words],
            cwd=self.path,
            env=self.environment(),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def command(self, *words: str, status: int = 0) -> tuple[str, str]:
        """Run `graphtrain WORDS`, expect a status, and return what it printed."""
        process = self.start(*words)
        out, err = process.communicate(timeout=300)
        assert process.returncode == status, err
        return out, err

    def journal(self, directory: str = "run") -> list[dict]:
        """Records of a run so far; a line still being written is left out."""
        file = self.path / directory / "metrics.jsonl"
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        return [json.loads(line) for line in lines]

    def curve(self, directory: str = "run") -> list[tuple[int, float, float]]:
        """Step, loss and gradient norm of every step taken."""
        return [
            (record["step"], record["loss"], record["grad_norm"])
            for record in self.journal(directory)
            if "loss" in record
        ]


def furnish(path: Path, corpus: Path) -> None:
    path.mkdir(exist_ok=True)
    (path / "config.toml").write_text(CONFIG)
    (path / "data").symlink_to(corpus)


def meeting_address() -> str:
    """An address for --coordinator."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"
