"""`graphtrain checkpoints` on the directory of a run, without an object store."""

import json
import shutil

import jax
import numpy as np
import pytest
from click.testing import CliRunner

from graphtrain.checkpoints.checkpoint import Checkpoints
from graphtrain.checkpoints.steps import Retention, saved_steps
from graphtrain.cli.checkpoints import command
from graphtrain.errors import TrainingError
from graphtrain.run.directory_lock import locked_run_directory

HEAD = "parameters/head"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with three checkpoints, of which the first has the lowest validation loss."""
    run = tmp_path_factory.mktemp("trained") / "run"
    checkpoints = Checkpoints(run / "checkpoints", Retention(9))
    state = {"parameters": {"head": jax.device_put(np.ones((8, 64), np.float32))}}
    for step, loss in ((10, 1.5), (20, 2.5), (30, None)):
        identity = {"run.seed": 7}
        checkpoints.save(step, state, {"step": step}, validation_loss=loss, identity=identity)
    checkpoints.close()
    (run / "metrics.jsonl").write_text('{"step": 20, "loss": 2.25}\n')
    return run


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


def invoke(*words):
    """Call the command; return what it prints, and the error that it ends with."""
    result = CliRunner().invoke(command, list(map(str, words)))
    if result.exception is not None and not isinstance(result.exception, TrainingError):
        raise result.exception
    return result.stdout, result.exception


def damage(run, step):
    """Change one byte of the largest file of a checkpoint; return its name."""
    files = (run / "checkpoints" / str(step) / "state").rglob("*")
    path = max((path for path in files if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return path.name


def test_ls_tells_complete_damaged_and_quarantined_checkpoints_apart(run):
    next((run / "checkpoints/30/state/d").iterdir()).unlink()
    (run / "quarantine").mkdir()
    shutil.copytree(run / "checkpoints/10", run / "quarantine/15-1")
    (run / "checkpoints/40.orbax-checkpoint-tmp-1").mkdir()
    facts = json.loads(invoke("ls", run, "--json")[0])
    assert [(one["step"], one["status"], one["loss"], one["validation_loss"]) for one in facts] == [
        (10, "complete", None, 1.5),
        (15, "quarantined", None, None),
        (20, "complete", 2.25, 2.5),
        (30, "damaged", None, None),
    ]
    assert "cannot be read (No such file" in facts[-1]["reason"] and facts[0]["bytes"] > 2048
    table, _ = invoke("ls", run)
    assert [line.split()[0] for line in table.splitlines()] == ["step", "10", "15", "20", "30"]


def test_verify_reads_every_byte_and_fails_by_its_status(run):
    assert invoke("verify", run) == ("10: intact\n20: intact\n30: intact\n", None)
    name = damage(run, 20)
    out, error = invoke("verify", run)
    lines = out.splitlines()
    assert (lines[0], lines[2]) == ("10: intact", "30: intact")
    assert name in lines[1] and "does not have the digest" in lines[1]
    assert "1 of 3 checkpoints" in str(error) and error.exit_status == 2
    assert invoke("verify", run, "--step", 30)[1] is None
    assert json.loads(invoke("verify", run, "--step", 20, "--json")[0])[0]["step"] == 20


def test_show_says_what_the_arrays_are_and_what_run_they_are_of(run):
    facts = json.loads(invoke("show", run, "--step", "best", "--json")[0])
    assert (facts["step"], facts["validation_loss"]) == (10, 1.5)
    assert (facts["identity"], facts["data_position"]) == ({"run.seed": 7}, {"step": 10})
    array = facts["arrays"][HEAD]
    assert (array["shape"], array["dtype"]) == ([8, 64], "float32")
    assert "CPU" in array["sharding"].upper()
    assert all(len(file["xxh3_128"]) == 32 for file in facts["files"].values())
    assert f"{HEAD}  [8, 64]  float32" in invoke("show", run)[0]


def test_gc_removes_what_a_dry_run_says_and_no_damaged_checkpoint(run):
    (run / "checkpoints/40.orbax-checkpoint-tmp-1").mkdir()
    (run / "checkpoints/20/manifest.json").unlink()
    words = ["gc", run, "--keep", 1]
    for more, steps in ((["--keep-best"], []), (["--keep-every", 10], []), ([], [10])):
        out, _ = invoke(*words, *more, "--dry-run")
        assert "1 unfinished" in out and out.rstrip().endswith(": 10" if steps else "ones")
    assert saved_steps(run / "checkpoints") == [10, 20, 30]
    assert invoke(*words)[0] == "removed 1 checkpoint and 1 unfinished ones: 10\n"
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["20", "30"]


def test_gc_leaves_a_run_that_is_being_trained_alone(run):
    with locked_run_directory(run):
        _, error = invoke("gc", run, "--keep", 1)
    assert "another process is training into" in str(error)
    assert saved_steps(run / "checkpoints") == [10, 20, 30]


def test_a_missing_run_or_step_is_named(run, tmp_path):
    assert "no such run" in str(invoke("ls", tmp_path / "none")[1])
    assert "available steps: 10, 20, 30" in str(invoke("show", run, "--step", 15)[1])


def test_a_directory_without_a_run_is_refused_and_a_run_without_checkpoints_is_not_intact(tmp_path):
    cache, new = tmp_path / "cache", tmp_path / "new"
    cache.mkdir()
    (new / "checkpoints").mkdir(parents=True)
    refused = [("ls", cache), ("verify", cache), ("gc", cache, "--keep", 1), ("verify", new)]
    for words in refused:
        out, error = invoke(*words)
        assert str(error).startswith(f"no checkpoints in {words[1]}; name ") and not out
        assert error.exit_status == 2
    assert list(cache.iterdir()) == []
    assert json.loads(invoke("ls", new, "--json")[0]) == []
    assert invoke("gc", new, "--keep", 1)[0] == "removed 0 checkpoints and 0 unfinished ones\n"
