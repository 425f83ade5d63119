"""Errors advise what would help: each remedy is that of its cause."""

import errno
import os
from types import SimpleNamespace

import pytest

from graphtrain.checkpoints.output_directory import write_errors
from graphtrain.config.schema import Data, Run
from graphtrain.errors import TrainingError
from graphtrain.run.opening import needed_graphs
from graphtrain.run.programs import _listed


@pytest.mark.parametrize(
    ("number", "name", "remedy"),
    [
        (errno.ENOSPC, None, "; free space there, or set run.directory to another path"),
        (errno.EEXIST, "run", "; remove the file run, or set run.directory to another path"),
        (errno.EACCES, None, "; set run.directory to another path"),
        (errno.ENOENT, None, "; set run.directory to another path"),
    ],
)
def test_a_directory_that_cannot_be_written_has_the_remedy_of_its_cause(number, name, remedy):
    with pytest.raises(TrainingError) as found, write_errors("run"):
        raise OSError(number, os.strerror(number), name)
    assert str(found.value) == f"run cannot be written ({os.strerror(number)}){remedy}"


def test_missing_graphs_are_listed_in_words():
    assert _listed(["train"]) == "train step"
    assert _listed(["init", "train", "evaluate"]) == "init, train and evaluate steps"


def test_a_run_without_validation_data_needs_no_evaluation_step():
    run = Run(directory="a", steps=1, data=Data(train="a"))
    assert needed_graphs(run, resuming=False) == ["init", "train"]
    run = Run(directory="a", steps=1, data=Data(train="a", validation="b"))
    assert needed_graphs(run, resuming=True) == ["train", "evaluate"]


def test_a_reshard_that_reorders_nothing_does_not_say_so(monkeypatch, tmp_path):
    from in_process import graphtrain

    from graphtrain.checkpoints import reshard

    made = SimpleNamespace(step=3, arrays=2, bytes=10, reordered=0)
    monkeypatch.setattr(reshard, "reshard", lambda *_, **__: made)
    words = ["convert", "reshard", tmp_path / "a", tmp_path / "b", "--to", tmp_path / "c.toml"]
    assert graphtrain(*words).out == f"{tmp_path / 'b'}: step 3, 2 arrays, 10 bytes\n"
