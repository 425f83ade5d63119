"""New checkpoints of a run: each complete one once, also when the run begins again."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from graphtrain.api.watching import watch
from graphtrain.checkpoints.manifest import write_manifest
from graphtrain.errors import TrainingError
from graphtrain.run import new_checkpoints as module
from graphtrain.run.directory_lock import locked_run_directory
from graphtrain.run.new_checkpoints import new_checkpoints
from graphtrain.run.serving import open_engine
from graphtrain.weights.sources import checkpoint_step


@pytest.fixture(autouse=True)
def polls(monkeypatch) -> None:
    monkeypatch.setattr(module, "_POLL_SECONDS", 0.001)


def save(run: Path, step: int) -> None:
    part = run / "checkpoints" / f"{step}.part"
    part.mkdir(parents=True)
    (part / "array").write_bytes(bytes(step))
    write_manifest(part)
    part.rename(run / "checkpoints" / str(step))


def test_the_last_checkpoint_and_then_each_new_one(tmp_path):
    save(tmp_path, 5)
    save(tmp_path, 10)
    with locked_run_directory(tmp_path):
        steps = new_checkpoints(tmp_path)
        assert next(steps) == 10
        (tmp_path / "checkpoints" / "12.orbax-checkpoint-tmp").mkdir()  # being written
        save(tmp_path, 15)
        shutil.rmtree(tmp_path / "checkpoints" / "5")
        assert next(steps) == 15
        save(tmp_path, 20)
        save(tmp_path, 25)
        assert [next(steps), next(steps)] == [20, 25]
        # As --fresh does: the earlier run is moved, and the same steps are saved again.
        (tmp_path / "checkpoints").rename(tmp_path / "earlier")
        save(tmp_path, 10)
        assert next(steps) == 10
    save(tmp_path, 30)
    assert list(steps) == [30]


def test_a_run_that_has_ended_has_one_last_checkpoint_or_is_refused(tmp_path):
    with pytest.raises(TrainingError, match="no process trains this run; start it first"):
        list(new_checkpoints(tmp_path))
    save(tmp_path, 5)
    assert list(new_checkpoints(tmp_path)) == [5]
    assert list(tmp_path.iterdir()) == [tmp_path / "checkpoints"]  # nothing is written


def test_a_checkpoint_of_an_adapter_that_the_run_deletes_is_left_out(tmp_path, monkeypatch):
    def load(engine, program, run, step):
        if step == 10:  # the run keeps one
            shutil.rmtree(tmp_path / "checkpoints" / "10")
        checkpoint_step(Path(run.directory), step)  # as weights of an adapter are opened

    monkeypatch.setattr(open_engine, "load_checkpoint", load)
    batch = SimpleNamespace(
        config=SimpleNamespace(run=SimpleNamespace(directory=str(tmp_path))),
        program=None,
        open_engine=lambda step, cache, observe: "engine",
        continue_with=lambda engine: iter([]),
    )
    save(tmp_path, 5)
    logged = []
    with locked_run_directory(tmp_path):
        answers = watch(batch, cache=tmp_path / "cache", log=logged.append)  # type: ignore[arg-type]
        assert next(answers) == (5, [])
        save(tmp_path, 10)
        save(tmp_path, 15)
        assert next(answers) == (15, [])
    assert list(answers) == []
    assert logged == [
        f"no answers of step 10: no such checkpoint in {tmp_path}; existing steps: 5, 15"
    ]
