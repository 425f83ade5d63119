"""A run whose data is in an object store is the run on local files, killed or not."""

import shutil
import time

import pytest
from places import Place
from remote_trials import serving
from storage import credentials, failing

from graphtrain.cache.remote import ObjectStore

pytest.importorskip("obstore")

STEPS = ["--set", "run.steps=40"]
STREAM = [
    *STEPS,
    "--set", "run.data.train=s3://runs/data/train",
    "--set", "run.data.validation=s3://runs/data/validation",
    "--set", "run.data.stream.cache=cached",
]  # fmt: skip


def upload(place: Place) -> None:
    store = ObjectStore("s3://runs/data")
    for path in sorted((place.path / "data").glob("[tv]*.*")):
        store.put_file(path.name, path)


def test_a_killed_run_on_streamed_data_is_that_on_local_files(place, tmp_path, monkeypatch):
    place.command("run", "config.toml", *STEPS, "--set", "run.directory=reference")
    (tmp_path / "runs").mkdir()
    with serving(tmp_path) as server, failing(server.url, share=0.0) as network:
        for name, value in credentials(network.url).items():
            monkeypatch.setenv(name, value)
        upload(place)
        network.share = 0.5
        process = place.start("run", "config.toml", *STREAM)
        while not (place.path / "run/checkpoints/8").exists():
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        process.kill()
        process.communicate()
        shutil.rmtree(place.path / "cached")  # resumed on another host
        out, err = place.command("run", "config.toml", *STREAM)
        assert "resumed from" in out and "data: s3://runs/data/train, " in err
        assert place.curve() == place.curve("reference")
        ends = [
            [one["validation_loss"] for one in place.journal(run) if "validation_loss" in one]
            for run in ("run", "reference")
        ]
        assert ends[0] == ends[1] and len(ends[0]) == 1
        more = [*STREAM, "--set", "run.steps=42"]
        for ending in ("bin", "idx", "json"):  # the dataset is replaced
            path = place.path / "data" / f"validation.{ending}"
            ObjectStore("s3://runs/data").put_file(f"train.{ending}", path)
        _, err = place.command("run", "config.toml", *more, status=2)
        assert "was saved by another program or with other data: run.data.train was" in err
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        words = [*more, "--set", "run.data.stream.timeout=1"]
        _, err = place.command("run", "config.toml", *words, status=2)
        assert "run.data.train: cannot read s3://runs/data/train.json" in err
