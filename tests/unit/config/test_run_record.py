"""Configuration files of a run that are not as the run wrote them."""

import itertools
import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from graphtrain.api.checks.checked import check_config
from graphtrain.api.checks.purpose import SHOW
from graphtrain.config import load_config, render
from graphtrain.config.run_record import RECORD, write_run_config
from graphtrain.errors import ConfigError

TEXT = """
[program]
target = "cpu:1"
[program.model]
layers = 1
embed = 16
heads = 2
mlp = 32
vocab = 300
[program.batch]
global_batch_size = 2
seq_len = 16
[run]
directory = "run"
steps = 3
[run.data]
train = "data/train"
[run.checkpoints]
local_every = 10
"""


@pytest.fixture
def run(tmp_path) -> Path:
    """Directory of a run that was resumed at step 2 with another local_every."""
    write_run_config(tmp_path, render(load_config(TEXT, ["run.checkpoints.local_every=5"])), 0)
    write_run_config(tmp_path, render(load_config(TEXT)), 2)
    assert (tmp_path / "config.2.toml").is_file()
    return tmp_path


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def test_what_the_run_wrote_is_read_without_a_warning(run):
    with warnings.catch_warnings(action="error"):
        load_config(run)
        write_run_config(run, render(load_config(TEXT, ["run.report_every=3"])), 3)
        load_config(run)


@pytest.mark.parametrize("old, new, said", [
    ("local_every = 10", "local_every = 18", "run.checkpoints.local_every was 10 and is 18"),
    ("\nlocal_every = 10", "\n#ocal_every = 10", "run.checkpoints.local_every was 10 and is unset"),
    ("# ", "#!", "its settings are the same"),
])  # fmt: skip
def test_a_change_is_read_and_named(run, old, new, said):
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text.replace(old, new, 1))
    with pytest.warns(UserWarning, match=f"config.toml is not as the run wrote it: {said}"):
        load_config(run)


def test_damage_that_is_no_toml_is_named_beside_the_error(run):
    change(run / "config.toml", "local_every = 10", "local_every 9 10")
    with (
        pytest.warns(UserWarning, match="as the run wrote it: it was edited or damaged"),
        pytest.raises(ConfigError, match="not valid TOML"),
    ):
        load_config(run)


def test_a_resumed_run_confirms_an_edit_once_and_names_damaged_copies(run):
    change(run / "config.toml", "local_every = 10", "local_every = 18")
    change(run / "config.2.toml", "local_every = 5", "local_every = 4")
    text = render(load_config(TEXT, ["run.checkpoints.local_every=18"]))
    with pytest.warns(UserWarning) as given:
        write_run_config(run, text, 3)
    assert "local_every was 10 and is 18" in str(given[0].message)
    assert "config.2.toml, the settings of an earlier part of the run, is not as" in str(
        given[1].message
    )
    with warnings.catch_warnings(action="error"):
        write_run_config(run, text, 4)
        load_config(run)


def test_a_run_killed_between_the_record_and_the_file_gives_no_warning(run):
    before = (run / "config.toml").read_bytes()
    write_run_config(run, render(load_config(TEXT, ["run.checkpoints.local_every=7"])), 3)
    (run / "config.toml").write_bytes(before)
    with warnings.catch_warnings(action="error"):
        load_config(run)


@pytest.mark.parametrize("position", [5, 40, 200, -20])
def test_a_damaged_record_is_named(run, position):
    content = bytearray((run / RECORD).read_bytes())
    content[position] ^= 1
    (run / RECORD).write_bytes(content)
    with pytest.warns(UserWarning, match=f"{RECORD} is not as it was written"):
        load_config(run)


def test_the_record_of_something_else_is_not_believed(run):
    (run / RECORD).write_text(json.dumps({"model_type": "llama"}))
    with pytest.warns(UserWarning, match=f"{RECORD} is not as it was written"):
        load_config(run)


def test_only_rank_0_warns_of_a_change_that_all_ranks_read(run):
    change(run / "config.toml", "local_every = 10", "local_every = 18")
    with warnings.catch_warnings(action="error"):
        assert check_config(run, SHOW, rank=1).config.run.checkpoints.local_every == 18
    with pytest.warns(
        UserWarning, match="as the run wrote it: run.checkpoints.local_every was 10 and is 18"
    ):
        check_config(run, SHOW, rank=0)
    # The real commands end before they connect, because of a setting that does not exist.
    for command, mark in itertools.product(("run", "evaluate"), ("0", "1")):
        ended = subprocess.run(
            [sys.executable, "-m", "graphtrain", command, str(run), "--set", "run.nonsense=1",
             "--coordinator", "127.0.0.1:1", "--processes", "2", "--rank", mark],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert ended.returncode == 2 and "run.nonsense" in ended.stderr
        assert ("as the run wrote it" in ended.stderr) == (mark == "0")
