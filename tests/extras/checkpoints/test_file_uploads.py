"""The process of `run.upload`: at intervals, at the end, and when its run is killed or it hangs."""

import socket
import time
import warnings
from pathlib import Path

import pytest

from graphtrain.checkpoints.file_copies_process import FINISH, MODULE, FileCopiesJob
from graphtrain.checkpoints.side_process import read_events, start_process
from graphtrain.config import load_config
from graphtrain.planning.parameters import ParameterCount
from graphtrain.run.events import RunStart
from graphtrain.run.file_uploads import uploading_files

pytest.importorskip("obstore")

CONFIG = """
[program]
target = "cpu:1"
model = {{ layers = 1, embed = 8, heads = 2, mlp = 8, vocab = 257 }}
batch = {{ global_batch_size = 8, seq_len = 8 }}

[run]
directory = "{directory}"
steps = 9
upload = {{ every_seconds = 0.2, {upload} }}
data = {{ train = "data/train" }}
"""


@pytest.fixture
def run(tmp_path) -> Path:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/run.log").write_text("began\n")
    return tmp_path / "run"


def begin(run: Path, upload: str) -> RunStart:
    config = load_config(CONFIG.format(directory=run, upload=upload))
    return RunStart(config, run, 0, ParameterCount(1, 0))


def wait_for(path: Path, text: str) -> None:
    for _ in range(300):
        if path.exists() and path.read_text() == text:
            return
        time.sleep(0.05)
    raise AssertionError(f"{path} does not have {text!r}")


def test_files_are_uploaded_at_intervals_and_at_the_end(run, tmp_path):
    start = begin(run, f'remote = "{tmp_path / "store"}"')
    copy = tmp_path / "store/run/run.log"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with uploading_files(start.config.run, print) as (uploads,):
            uploads.on_run_start(start)
            wait_for(copy, "began\n")
            with (run / "run.log").open("a") as log:
                log.write("step 1\n")
            wait_for(copy, "began\nstep 1\n")
            (run / "run.log").write_text("ended\n")
    assert copy.read_text() == "ended\n"


def test_a_store_that_hangs_is_one_warning_and_a_bounded_wait(run, monkeypatch):
    with socket.socket() as server:  # accepts, and never answers
        server.bind(("127.0.0.1", 0))
        server.listen()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
            monkeypatch.setenv(name, "x")
        start = begin(run, 'remote = "s3://bucket/run", timeout = 0.5')
        with (
            pytest.warns(UserWarning, match=r"s3://bucket/run: it took more than 0\.5 s; the next"),
            uploading_files(start.config.run, print) as (uploads,),
        ):
            uploads.on_run_start(start)
            began = time.monotonic()
            for step in range(1000):
                uploads.on_step(step, {})
            took = time.monotonic() - began
        assert took < 0.5 and time.monotonic() - began < 5


def test_a_store_that_fails_is_one_warning_until_it_answers_again(run, tmp_path):
    store, notes = tmp_path / "store", []
    store.write_text("a file, in which nothing can be written")
    start = begin(run, f'remote = "{store}"')
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with uploading_files(start.config.run, notes.append) as (uploads,):
            uploads.on_run_start(start)
            for _ in range(300):
                uploads.on_step(1, {})
                if caught and store.is_file():
                    store.unlink()
                if notes:
                    break
                time.sleep(0.05)
    (one,) = caught
    assert "run.upload: files of the run are not all in" in str(one.message)
    assert notes == [f"uploaded the files of the run to {store}"]
    assert (store / "run/run.log").read_text() == "began\n"


def test_the_last_lines_of_a_run_that_is_killed_are_uploaded(run, tmp_path):
    job = FileCopiesJob(str(run), str(tmp_path / "store"), None, 1000.0)
    process = start_process(MODULE, job)
    assert process.stdin is not None
    assert process.stdout is not None
    assert next(read_events(process.stdout))["event"] == "uploaded"
    (run / "run.log").write_text("lost\n")
    process.stdout.close()
    process.stdin.close()  # without FINISH, as when the run is killed
    assert FINISH == "finish\n"
    assert process.wait(20) == 0
    assert (tmp_path / "store/run/run.log").read_text() == "lost\n"
