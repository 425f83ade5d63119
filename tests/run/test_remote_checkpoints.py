"""Checkpoints in an object store: of a run that is killed, and whose store fails."""

import json
import shutil
import signal

import pytest
from remote_trials import Trial, arrays, is_equal, serving, uploaders
from storage import credentials, failing

pytest.importorskip("obstore")

STEPS = ["--set", "run.steps=60", "--set", "run.checkpoints.local_every=2"]

# The command, which tries to reach the store for half a second where it would for two minutes.
IMPATIENT = """
from functools import partial
from graphtrain.run import remote_resume
remote_resume.RemoteCheckpoints = partial(remote_resume.RemoteCheckpoints, retry_seconds=0.5)
from graphtrain.cli import main
main()
"""


def test_a_killed_run_resumes_elsewhere_from_a_store_that_fails(place, tmp_path, monkeypatch):
    keep = ["--set", "run.checkpoints.keep=100", "--set", "run.directory=reference"]
    place.command("run", "config.toml", *STEPS, *keep)
    (tmp_path / "runs").mkdir()
    with serving(tmp_path) as server, failing(server.url) as network:
        for name, value in credentials(network.url).items():
            monkeypatch.setenv(name, value)
        trial = Trial(place, server, network, STEPS, seed=1, step_seconds=0.2)
        for _ in range(3):
            trial.kill_trainer(0.4)
            trial.check()
        trial.kill_server(0.4)
        trial.check()
        said = trial.finish()
        trial.check()
    assert "resumed from" in said and "is not in s3" not in said
    assert trial.seen["wrong"] == 0 and trial.seen["restored"] > 2
    assert network.met["passed"] < network.met.total()
    last = [arrays(place.path / name / "checkpoints", 60) for name in ("reference", "elsewhere")]
    assert is_equal(*last)
    assert place.curve("elsewhere") == place.curve("reference")
    out, _ = place.command("checkpoints", "ls", "elsewhere", "--json")
    assert [one["step"] for one in json.loads(out)][-3:] == [56, 58, 60]


def test_a_store_that_cannot_be_reached_never_stops_training(place, monkeypatch):
    for name, value in credentials("http://127.0.0.1:9").items():
        monkeypatch.setenv(name, value)
    words = ["--set", "run.checkpoints.remote=s3://runs/two", "--set", "run.steps=8"]
    place.command("run", "config.toml", "--set", "run.steps=4")  # there is a checkpoint here
    limit = ["--set", "run.checkpoints.remote_timeout=1"]
    process = place.start_python("-c", IMPATIENT, "run", "config.toml", *words, *limit)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0 and "warning: resuming from run, step 4: cannot list s3" in err
    assert "the checkpoint of step 8 is not in s3://runs/two; the next start" in err
    assert "graphtrain checkpoints push run s3://runs/two --step 8" in err
    assert not uploaders("run")
    assert "upload_lag_steps" in place.journal()[-2] and len(place.curve()) == 8


def test_a_run_that_is_asked_to_stop_uploads_what_it_saves(place, tmp_path):
    """Its checkpoints are on a disk of their own, which is lost."""
    store = [
        "--set", f"run.checkpoints.remote={tmp_path / 'store'}",
        "--set", f"run.checkpoints.local={tmp_path / 'memory'}",
    ]  # fmt: skip
    words = [
        "--set", "run.steps=100000", "--set", "run.checkpoints.local_every=100000",
        "--set", "run.upload.every_seconds=1000", "--set", "run.profile='1:1'",
    ]  # fmt: skip
    process = place.start("run", "config.toml", *store, *words)
    while len(place.journal()) < 3:
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    last = place.journal()[-1]["step"]
    out, _ = place.command("checkpoints", "verify", str(tmp_path / "store"))
    assert out == f"{last}: intact\n"
    copies = tmp_path / "store/run"
    for name in ("metrics.jsonl", "run.log", "goodput.jsonl", "config.toml"):
        assert (copies / name).read_bytes() == (place.path / "run" / name).read_bytes(), name
    assert list(copies.glob("tensorboard/events*"))
    assert list(copies.glob("profiles/1-1/rank-0/plugins/profile/*/*.xplane.pb"))
    assert (place.path / "run/checkpoints").readlink() == tmp_path / "memory"
    shutil.rmtree(tmp_path / "memory")
    more = ["--set", f"run.steps={last + 1}", "--set", "run.export=hf"]
    out, _ = place.command("run", "config.toml", *store, *more)
    assert f"trained {last + 1} steps (resumed from {last})" in out
    exported = place.path / f"run/hf-{last + 1}"
    assert f"exported to run/{exported.name}\n" in out
    weights = (exported / "model.safetensors").read_bytes()
    assert json.loads((exported / "config.json").read_text())["model_type"] == "llama"
    pushed = tmp_path / "store/run" / exported.name
    assert (pushed / "model.safetensors").read_bytes() == weights
    # A start of the complete run exports and pushes again what is missing, or of another run.
    (exported / "graphtrain.json").write_text("{}")
    (pushed / "config.json").unlink()
    out, _ = place.command("run", "config.toml", *store, *more)
    assert out.startswith(f"run already has {last + 1} steps")
    assert (exported / "model.safetensors").read_bytes() == weights
    assert (place.path / "run/earlier/1" / exported.name).is_dir()
    assert (pushed / "config.json").read_bytes() == (exported / "config.json").read_bytes()
    assert (tmp_path / "memory" / str(last + 1)).is_dir()
    _, err = place.command("run", "config.toml", *store, *words, "--fresh", status=2)
    assert "memory has checkpoints" in err and "with --fresh, move them away" in err
    _, err = place.command("run", "config.toml", *store[:2], *words, "--fresh", status=2)
    assert f"has checkpoints (steps {last}, {last + 1})" in err
    other = ["--set", "run.directory=other", "--set", "run.seed=9"]
    _, err = place.command("run", "config.toml", *store[:2], *words, *other, status=2)
    assert "run.seed was 0 and is 9" in err and not (place.path / "other/checkpoints").exists()
