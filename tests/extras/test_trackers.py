"""Trackers get every metric on a thread, through the real clients; a failing one ends no run."""

import json
import struct
import threading
import time
import warnings
from pathlib import Path

import pytest

from graphtrain.config import load_config
from graphtrain.planning.parameters import ParameterCount
from graphtrain.run.events import RunStart, RunSummary
from graphtrain.run.trackers import thread as trackers
from graphtrain.run.trackers.thread import TrackerThread, tracking

CONFIG = """
[program]
target = "cpu:1"
model = { layers = 1, embed = 8, heads = 2, mlp = 8, vocab = 257 }
batch = { global_batch_size = 8, seq_len = 8 }

[run]
directory = "run"
steps = 9
trackers = ["%s"]
data = { train = "data/train" }
"""


def begin(directory: Path, name: str, step: int = 0) -> RunStart:
    config = load_config(CONFIG % name)
    return RunStart(config, directory, step, ParameterCount(1, 0))


def track(directory: Path, name: str, steps: range, *, stopped_by: str | None = None) -> None:
    """One start of a run, which reports the loss 1 / step, and evaluates after its last step."""
    start = begin(directory, name, steps[0] - 1)
    with tracking(start.config.run) as (callback,):
        callback.on_run_start(start)
        for step in steps:
            callback.on_step(step, {"loss": 1 / step, "mfu": None})
        callback.on_evaluate(steps[-1], {"validation_loss": 2.0, "boolq/acc": 0.5})
        summary = RunSummary(directory, steps[-1], None, 2.0, stopped_by)
        callback.on_run_end(summary)


def history(file: Path) -> list[dict[str, str]]:
    """Rows of an offline run, when its process has written the last record."""
    for _ in range(300):
        rows, is_complete = read_wandb(file)
        if is_complete:
            return rows
        time.sleep(0.1)
    raise AssertionError(f"{file} has no end")


def read_wandb(file: Path) -> tuple[list[dict[str, str]], bool]:
    """Rows, and whether the file has its end: a log of LevelDB with protobuf messages."""
    from wandb.proto import wandb_internal_pb2

    content, at, record, rows, is_complete = file.read_bytes(), 7, b"", [], False
    while at + 7 <= len(content):
        length, kind = struct.unpack("<HB", content[at + 4 : at + 7])
        if not kind:  # the rest of a block
            at += -at % 32768
            continue
        if at + 7 + length > len(content):  # it is being written
            break
        record += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            message = wandb_internal_pb2.Record()
            message.ParseFromString(record)
            record = b""
            is_complete |= message.HasField("exit")
            items = message.history.item
            rows.append({one.key or one.nested_key[0]: one.value_json for one in items})
        at += -at % 32768 if -at % 32768 < 7 else 0
    return rows, is_complete


def test_wandb_resumes_one_run_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    track(tmp_path, "wandb", range(1, 5), stopped_by="SIGTERM")
    track(tmp_path, "wandb", range(3, 6))  # from the checkpoint of step 2
    identifier = json.loads((tmp_path / "trackers/wandb.json").read_text())["id"]
    files = sorted((tmp_path / "trackers/wandb").glob(f"offline-run-*/run-{identifier}.wandb"))
    rows = [row for file in files for row in history(file)]
    steps = [(int(row["step"]), row["loss"]) for row in rows if "loss" in row]
    assert [step for step, _ in steps] == [1, 2, 3, 4, 3, 4, 5]
    assert all(float(loss) == 1 / step for step, loss in steps)
    assert any(row.get("boolq/acc") == "0.5" for row in rows)


def test_mlflow_resumes_one_run_in_a_file_store(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    track(tmp_path, "mlflow", range(1, 5), stopped_by="SIGTERM")
    track(tmp_path, "mlflow", range(5, 10))
    client = MlflowClient()
    experiment = client.get_experiment_by_name("graphtrain")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["program.model.embed"] == "8"
    losses = client.get_metric_history(run.info.run_id, "loss")
    assert [(one.step, one.value) for one in losses] == [(n, 1 / n) for n in range(1, 10)]
    assert run.data.metrics["boolq/acc"] == 0.5


def test_prometheus_finds_the_last_metrics_in_a_file(tmp_path):
    from prometheus_client.parser import text_string_to_metric_families

    track(tmp_path, "prometheus", range(1, 5))
    text = (tmp_path / "trackers/graphtrain.prom").read_text()
    values = {
        family.name: [(sample.value, sample.labels["run"]) for sample in family.samples]
        for family in text_string_to_metric_families(text)
    }
    assert values["graphtrain_loss"] == [(0.25, str(tmp_path))]
    assert values["graphtrain_step"] == [(4.0, str(tmp_path))]
    assert values["graphtrain_boolq_acc"] == [(0.5, str(tmp_path))]
    assert values["graphtrain_completed"] == [(1.0, str(tmp_path))]


class Toy:
    """Tracker that notes the thread of each call, and fails at a step."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at, self.threads, self.steps = fails_at, set(), []

    def start(self, start, identifier):
        return "toy"

    def log(self, records):
        self.threads.add(threading.get_ident())
        for step, _ in records:
            if step == self.fails_at:
                raise ConnectionError("no route to the service\nmore")
            self.steps.append(step)

    def end(self, completed):
        self.completed = completed


def test_a_tracker_is_called_on_another_thread(tmp_path, monkeypatch):
    toy = Toy()
    monkeypatch.setattr(trackers, "open_tracker", lambda name: toy)
    track(tmp_path, "prometheus", range(1, 5), stopped_by="SIGTERM")
    assert toy.steps == [1, 2, 3, 4, 4] and toy.completed is False
    assert threading.get_ident() not in toy.threads


def test_a_tracker_that_fails_is_one_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "open_tracker", lambda name: Toy(fails_at=2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        track(tmp_path, "prometheus", range(1, 40))
    (warning,) = [str(one.message) for one in caught if "run.trackers" in str(one.message)]
    assert warning == (
        "run.trackers: prometheus stopped: ConnectionError: no route to the service; the run "
        "continues, and all metrics are in metrics.jsonl"
    )


def test_a_damaged_identifier_is_not_a_new_run(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "open_tracker", lambda name: Toy())
    (tmp_path / "trackers").mkdir()
    (tmp_path / "trackers/prometheus.json").write_text("{")
    with pytest.warns(UserWarning, match=r"prometheus\.json is damaged .*; remove it"):
        track(tmp_path, "prometheus", range(1, 3))


def test_a_run_that_is_refused_opens_no_tracker():
    thread = TrackerThread("wandb")
    thread.close()
