"""Single checkpoints copied by hand: never among those of another run, and never over another."""

import json
import os
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from click.testing import CliRunner

from graphtrain.checkpoints import upload_process
from graphtrain.checkpoints.checkpoint import Checkpoints
from graphtrain.checkpoints.remote import RemoteCheckpoints
from graphtrain.checkpoints.same_run import OtherRun, check_store
from graphtrain.checkpoints.steps import Retention, saved_steps
from graphtrain.cli.checkpoints import command
from graphtrain.config import load_config
from graphtrain.config.identity import mathematics
from graphtrain.config.schema import CheckpointSettings
from graphtrain.errors import CacheError, TrainingError
from graphtrain.run.remote_resume import fetch_newest

pytest.importorskip("obstore")

CONFIG = """[program.model]
layers = 1
embed = 8
heads = 2
mlp = 8
vocab = 32
[program.batch]
global_batch_size = 2
seq_len = 8
[run]
directory = "run"
steps = 9
seed = {seed}
[run.data]
train = "data/train"
"""
PHASES = [{"until": 10, "global_batch_size": 4}, {"until": None, "global_batch_size": 8}]


def trained(directory: Path, seed: int, *steps: int, changes=(), value: float = 1.0, **identity):
    """A run with checkpoints of some steps; further settings of its identity are by phase."""
    checkpoints = Checkpoints(directory / "checkpoints", Retention(9))
    state = {"parameters": jax.device_put(np.full(64, value, np.float32))}
    for step in steps:
        named = {**identity, "run.seed": seed, "run.steps": step}
        checkpoints.save(step, state, {"step": step}, identity=named, changes=list(changes))
    checkpoints.close()
    return directory


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Runs of seed 0, also trained to a second end, and of seed 7."""
    folder = tmp_path_factory.mktemp("runs")
    trained(folder / "zero", 0, 8, 12)
    trained(folder / "again", 0, 8, value=2.0)
    trained(folder / "seven", 7, 8)
    return folder


@pytest.fixture
def store(runs, tmp_path) -> str:
    """A store with both checkpoints of the run of seed 0."""
    url = str(tmp_path / "store")
    for step in (8, 12):
        assert invoke("push", runs / "zero", url, "--step", step)[1] is None
    return url


def invoke(*words):
    """Call the command; return what it prints, and the error that it ends with."""
    result = CliRunner().invoke(command, list(map(str, words)))
    if result.exception is not None and not isinstance(result.exception, TrainingError):
        raise result.exception
    return result.stdout, result.exception


def contents(store: str) -> dict[str, bytes]:
    paths = (path for path in Path(store).rglob("*") if path.is_file())
    return {os.fspath(path): path.read_bytes() for path in paths}


def test_a_store_of_another_run_is_refused_with_both_values_and_keeps_every_byte(runs, store):
    before = contents(store)
    for more in ((), ("--replace",)):
        out, error = invoke("push", runs / "seven", store, *more)
        assert "run.seed is 7 and there 0; give each run a location" in str(error) and not out
        assert f"step 8 of {runs / 'seven'} is of another run than step 12 in {store}" in str(error)
    assert contents(store) == before and error.exit_status == 2


def test_another_checkpoint_of_the_same_step_is_replaced_only_when_asked(runs, store, tmp_path):
    before = contents(store)
    assert "has step 8 already" in invoke("push", runs / "zero", store, "--step", 8)[0]
    out, error = invoke("push", runs / "again", store)
    assert "has another checkpoint of step 8" in str(error) and "--replace" in str(error)
    assert contents(store) == before and not out
    assert "uploaded step 8" in invoke("push", runs / "again", store, "--replace")[0]
    assert RemoteCheckpoints(store).has(runs / "again", 8)


def test_a_checkpoint_is_not_put_among_those_of_another_run(runs, store, tmp_path):
    mix = shutil.copytree(runs / "seven", tmp_path / "mix")
    out, error = invoke("pull", store, mix, "--step", 12)
    assert "run.seed is 0 and there 7" in str(error) and f"step 8 of {mix}" in str(error)
    assert saved_steps(mix / "checkpoints") == [8] and not out
    part = shutil.copytree(runs / "zero", tmp_path / "part")
    shutil.rmtree(part / "checkpoints/8")
    assert invoke("pull", store, part, "--step", 8)[1] is None
    assert saved_steps(part / "checkpoints") == [8, 12]


def test_without_a_checkpoint_the_settings_of_a_run_count(tmp_path):
    run, store = tmp_path / "run", tmp_path / "store"
    settings = mathematics(load_config(CONFIG.format(seed=0)))
    data = {"run.data.train": [{"digest": "0"}], "tokenizer": {}}
    source = trained(tmp_path / "source", 0, 8, **data, **settings)
    assert invoke("push", source, store)[1] is None
    run.mkdir()
    (run / "metrics.jsonl").touch()
    (run / "config.toml").write_text(CONFIG.format(seed=7))
    _, error = invoke("pull", store, run)
    assert "run.seed is 0 and there 7" in str(error) and f"{run / 'config.toml'}" in str(error)
    (run / "config.toml").write_text(CONFIG.format(seed=0))
    assert invoke("pull", store, run)[1] is None


def test_permitted_changes_and_phases_are_no_other_run(tmp_path):
    change = {"step": 8, "name": "run.seed", "from": 0, "to": 7}
    of_phases = {"program.phase": PHASES, "program.batch.global_batch_size": 4}
    early = trained(tmp_path / "early", 0, 8, **of_phases)
    later = {**of_phases, "program.batch.global_batch_size": 8}
    late = trained(tmp_path / "late", 7, 20, changes=[change], **later)
    other = trained(tmp_path / "other", 7, 20, **later)
    stores = [RemoteCheckpoints(str(tmp_path / name), create=True) for name in ("one", "two")]
    stores[0].upload(early, 8)
    check_store(stores[0], late / "checkpoints", 20)
    with pytest.raises(OtherRun, match=r"run\.seed is 7 and there 0;"):
        check_store(stores[0], other / "checkpoints", 20)
    stores[1].upload(late, 20)
    check_store(stores[1], early / "checkpoints", 8)


def test_a_run_that_is_further_than_the_store_of_another_one_does_not_start(store, tmp_path):
    run, settings = trained(tmp_path / "run", 7, 30), CheckpointSettings(remote=store)
    with pytest.raises(OtherRun, match=r"run\.seed is 7 and there 0"):
        fetch_newest(run, settings, lambda *_: None, lambda _: None)


def test_a_store_that_fails_does_not_hinder_a_run_whose_hosts_have_a_step(
    store, tmp_path, monkeypatch
):
    settings = CheckpointSettings(remote=store)

    def fail(self):
        raise CacheError("no connection")

    with monkeypatch.context() as patched:
        patched.setattr(RemoteCheckpoints, "steps", fail)
        with pytest.raises(TrainingError, match=r"cannot be read, and there is none .* no connec"):
            fetch_newest(tmp_path, settings, lambda *_: None, lambda _: None)
        with pytest.warns(UserWarning, match=r"from the disks of the hosts, step 900: no connec"):
            fetch_newest(tmp_path, settings, lambda *_: None, lambda _: None, on_hosts=900)
    fetch_newest(tmp_path, settings, lambda *_: None, lambda _: None, on_hosts=900)
    assert not (tmp_path / "checkpoints").exists()  # what the store has is older


def test_a_run_uploads_nothing_among_the_checkpoints_of_another_one(runs, store, capsys):
    before, retention = contents(store), Retention(1)
    jobs = [upload_process.UploadJob(str(runs / one), store, None, retention)
            for one in ("seven", "again")]  # fmt: skip
    request, queue = upload_process.UploadRequest(8), upload_process._Queue()
    assert upload_process._upload(jobs[0], request, queue)  # and it is not tried again
    event = json.loads(capsys.readouterr().out)
    assert event["event"] == "refused" and "run.seed is 7 and there 0" in event["reason"]
    assert contents(store) == before
    assert upload_process._upload(jobs[1], request, queue)
    assert json.loads(capsys.readouterr().out)["replaces"]


def test_an_empty_store_has_nothing_to_verify(tmp_path):
    (tmp_path / "store/v1/steps").mkdir(parents=True)
    for words in (("ls",), ("verify",), ("gc", "--keep", 1)):
        _, error = invoke(*words, tmp_path / "store")
        assert str(error).startswith(f"no checkpoints in {tmp_path / 'store'}")
