"""Whose a run's directory is."""

import pytest

from graphtrain.errors import TrainingError
from graphtrain.run.directory_lock import locked_run_directory


def refuse(directory, written=()):
    with pytest.raises(ZeroDivisionError), locked_run_directory(directory):
        for name in written:
            (directory / name).touch()
        raise ZeroDivisionError


def test_a_refused_run_leaves_no_directory_that_it_made(tmp_path):
    refuse(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_with_something_in_it_or_from_before_stays(tmp_path):
    (tmp_path / "before").mkdir()
    refuse(tmp_path / "before")
    refuse(tmp_path / "run", ["metrics.jsonl"])
    assert {path.name for path in tmp_path.iterdir()} == {"before", "run"}


def test_only_one_owns_it_and_the_next_can_afterwards(tmp_path):
    with locked_run_directory(tmp_path / "run"):
        (tmp_path / "run/config.toml").touch()
        with (
            pytest.raises(TrainingError, match="another process"),
            locked_run_directory(tmp_path / "run"),
        ):
            pass
    with locked_run_directory(tmp_path / "run"):
        pass
