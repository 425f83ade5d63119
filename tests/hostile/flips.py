"""A tiny run and its dataset, in which single bits are flipped."""

import contextlib
import shutil
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import damage
import numpy as np
import parsers

from graphtrain.config import load_config, render
from graphtrain.config.run_record import write_run_config
from graphtrain.data.indexed.verify import verify
from graphtrain.errors import GraphtrainError
from graphtrain.models.lora.trainable import trained_arrays
from graphtrain.run.data_check import DataCheck
from graphtrain.run.metrics import Journal
from graphtrain.run.resume import Resumption, identity_of
from graphtrain.weights.sources import RunCheckpoint

CONFIG = """
[program]
target = "cpu:1"
[program.model]
layers = 1
embed = 16
heads = 2
mlp = 32
vocab = 300
dtype = "float32"
remat = "none"
[program.batch]
global_batch_size = 2
seq_len = 16
[run]
directory = "run"
steps = 3
[run.checkpoints]
keep = 1

[run.data]
train = "data/train"
validation = "data/validation"
"""
# Files that no command reads for its result: claims, logs, notes and charts of other programs, and
# the record of a preparation, without which the data is prepared again.
NOT_READ = (
    ".lease", "tensorboard", "_CHECKPOINT_METADATA", "commit_success.txt", "run.log",
    "goodput.jsonl", "data/manifest.json",
)  # fmt: skip


class TinyRun:
    """The run directory, the dataset, and what the sound files contain."""

    def __init__(self, place: Path, command: Callable[..., None]) -> None:
        self.place, self.outcomes, self.outcome = place, Counter[str](), ""
        (place / "a.toml").write_text(CONFIG)
        (place / "a.jsonl").write_text("\n".join(parsers._LINES * 3))
        with contextlib.chdir(place):
            words = ["--output", "data", "--tokenizer", "bytes", "--validation", "0.2"]
            command("data", "prepare", "a.jsonl", *words)
            command("run", "a.toml", "--compile", "--cache", "cache", "--set", "run.steps=2")
            command("run", "a.toml", "--cache", "cache")  # keeps config.2.toml
            assert Path("run/config.2.toml").is_file()
            self.sound = self._arrays()
        self.files = [
            path for name in ("run", "data") for path in sorted((place / name).rglob("*"))
            if path.is_file() and path.stat().st_size
        ]  # fmt: skip
        shutil.copytree(place / "run", place / "kept")

    def _arrays(self) -> dict[str, np.ndarray]:
        source = RunCheckpoint(Path("run"))
        return {
            path: source.read([path], 0 if path.startswith("layers/") else None)[0]
            for path in trained_arrays(source.program)
        }

    def flip(self, random: Random) -> tuple[Path, int]:
        """Flip one bit at a random place of all files together."""
        sizes = [path.stat().st_size for path in self.files]
        weights = [min(size, 4000) for size in sizes]  # small files too
        self.path = random.choices(self.files, weights)[0]
        self.content = self.path.read_bytes()
        position = random.randrange(len(self.content))
        flipped = bytearray(self.content)
        flipped[position] ^= 1 << random.randrange(8)
        self.path.write_bytes(flipped)
        return self.path, position

    def check(self) -> None:
        """Read everything as a resumed run does; raise a defect if the flip is silent."""
        self.outcome = "DEFECT"
        with contextlib.chdir(self.place):
            try:
                reported = self._read()
            except GraphtrainError as error:
                self.outcome = "refused"
                raise error from None
        if reported:
            self.outcome = "warned"
        elif any(name in str(self.path) for name in NOT_READ):
            self.outcome = "no command reads it"
        else:
            raise damage.Defect("silent")

    def _read(self) -> bool:
        """Return whether a warning was given."""
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            config = load_config(Path("run"))
            verify(config.run.data.train), verify("data/validation")
            DataCheck(config.run.data)
            resumption = Resumption(Path("run"), partial(identity_of, config))
            arrays = self._arrays()
            for path, array in self.sound.items():
                np.testing.assert_array_equal(arrays[path], array)
            info = resumption.info
            Journal(Path("run"), after=3, tensorboard=False, written=info.journal).close()
            write_run_config(Path("run"), render(config), start=3)
        return bool(given)

    def restore(self) -> None:
        """Put the sound files back."""
        self.path.write_bytes(self.content)
        run, kept = self.place / "run", self.place / "kept"
        for pattern in ("metrics.*jsonl", "config.*"):
            for path in run.glob(pattern):
                path.unlink()
            for path in kept.glob(pattern):
                shutil.copyfile(path, run / path.name)
