"""A checkpoint that the run deletes while another command reads it."""

import shutil
import threading

import pytest

from graphtrain.checkpoints.manifest import DamagedCheckpoint
from graphtrain.checkpoints.pruned import read_checkpoint
from graphtrain.errors import TrainingError


def make(directory, *steps):
    for step in steps:
        (directory / str(step)).mkdir()


def reader(directory, *, delete):
    """Read as if the run saved 9 and began to delete the checkpoint; it is gone a little later."""

    def read(step):
        if step == delete:
            make(directory, 9)
            threading.Timer(0.1, shutil.rmtree, [directory / str(step)]).start()
            raise DamagedCheckpoint(directory / str(step), "manifest.json is missing")
        return f"read {step}"

    return read


def test_the_newest_is_read_again_if_it_was_deleted_meanwhile(tmp_path):
    make(tmp_path, 5, 7)
    assert read_checkpoint(tmp_path, None, reader(tmp_path, delete=7)) == (9, "read 9")


def test_a_named_one_is_said_to_be_deleted_by_the_run(tmp_path):
    make(tmp_path, 5, 7)
    with pytest.raises(TrainingError, match=r"5 was deleted by the run while .* steps are 7, 9$"):
        read_checkpoint(tmp_path, 5, reader(tmp_path, delete=5))


def test_a_damaged_one_is_said_to_be_damaged(tmp_path):
    make(tmp_path, 5)

    def read(step):
        raise DamagedCheckpoint(tmp_path / "5", "manifest.json is missing")

    with pytest.raises(DamagedCheckpoint, match="is missing"):
        read_checkpoint(tmp_path, None, read)


def test_without_a_checkpoint_there_is_nothing_to_read_again(tmp_path):
    assert read_checkpoint(tmp_path / "none", None, str) == (None, "None")
