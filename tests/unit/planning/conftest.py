"""A small program, and how its settings are changed."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from graphtrain.config import load_config
from graphtrain.config.resolve import ResolvedProgram, resolve
from graphtrain.planning.remedies import WithOverrides

CONFIG = """
[program]
target = "v5e:2x2"
mesh = { fsdp = "rest" }
model = { layers = 4, embed = 512, heads = 8, mlp = 1024, vocab = 4096, remat = "none" }
batch = { global_batch_size = 16, seq_len = 512 }

[run]
directory = "run"
steps = 1
data = { train = "data" }
"""


@pytest.fixture
def vary(tmp_path: Path) -> WithOverrides:
    """The program of the file above with settings changed."""
    path = tmp_path / "config.toml"
    path.write_text(CONFIG)

    def vary(change: Sequence[str]) -> ResolvedProgram:
        return resolve(load_config(path, change).program)

    return vary
