"""A run whose data is in an object store is the run on local files, killed or not."""

import json
import shutil
import subprocess
import time

import pytest
from places import Place
from remote_trials import Server, serving, slow_program
from storage import credentials, failing

from graphtrain.cache.remote import ObjectStore
from graphtrain.data.indexed import blocks
from graphtrain.data.indexed.description import read_description, write_description

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


def test_a_server_that_is_killed_while_a_run_reads_delays_it_or_ends_it(
    place, tmp_path, monkeypatch
):
    """The same curve after the server is started again; an error if it stays away."""
    place.command("run", "config.toml", *STEPS, "--set", "run.directory=reference")
    small_blocks(place, monkeypatch)
    (tmp_path / "runs").mkdir()
    with serving(tmp_path) as server, failing(server.url, share=0.0) as network:
        for name, value in credentials(network.url).items():
            monkeypatch.setenv(name, value)
        upload(place)
        process = lose_server(place, server)
        time.sleep(4)
        network.address = server.start().removeprefix("http://")
        _, err = process.communicate(timeout=100)
        assert process.returncode == 0, err
        assert place.curve() == place.curve("reference")
        assert data_loading(place, "run") > data_loading(place, "reference") + 1
        shutil.rmtree(place.path / "run")
        process = lose_server(place, server, "--set", "run.data.stream.timeout=1")
        _, err = process.communicate(timeout=100)
        assert process.returncode == 2 and "cannot read s3://runs/data/train.bin" in err, err


def data_loading(place: Place, run: str) -> float:
    """Seconds for which a run waited for data; some batches are read ahead."""
    out, _ = place.command("goodput", run, "--json")
    return json.loads(out)["seconds"]["data_loading"]


def small_blocks(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Describe a copy of the data by blocks of 4 KiB, so that it has many."""
    data = place.path / "data"
    shutil.copytree(data, place.path / "copy")
    data.unlink()
    (place.path / "copy").rename(data)
    monkeypatch.setattr(blocks, "_BLOCK", 1 << 12)
    for name in ("train", "validation"):
        description = read_description(data / name)
        assert description is not None
        write_description(data / name, description)


def lose_server(place: Place, server: Server, *words: str) -> subprocess.Popen[str]:
    """Start a run; while it reads, kill the server and remove the blocks that it has read."""
    process = place.start_python("-c", slow_program(0.04), "run", "config.toml", *STREAM, *words)
    while not any(step >= 5 for step, _, _ in place.curve()):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    server.kill()
    for path in (place.path / "cached").rglob("*.blocks"):
        shutil.rmtree(path)
    return process
