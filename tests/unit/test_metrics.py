import subprocess
import sys
import warnings

import numpy as np
import pytest

from graphtrain.config.schema import MixtureOfExperts
from graphtrain.errors import TrainingError
from graphtrain.models.routing import metric_names
from graphtrain.run.earlier_runs import set_metrics_aside
from graphtrain.run.log import RunLog
from graphtrain.run.metrics import METRICS, Journal, read_journal


def write(directory, steps, after):
    journal = Journal(directory, after=after, tensorboard=False)
    for step in steps:
        journal.write({"step": step, "loss": 1.0 / step})
    journal.close()


def test_a_resumed_run_replaces_the_records_after_its_checkpoint(tmp_path):
    write(tmp_path, [1, 2, 3, 4], after=0)
    write(tmp_path, [3, 4, 5], after=2)
    assert [record["step"] for record in read_journal(tmp_path)] == [1, 2, 3, 4, 5]


def test_a_line_cut_short_is_left_out(tmp_path):
    write(tmp_path, [1, 2], after=0)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    assert [record["step"] for record in read_journal(tmp_path)] == [1, 2]
    write(tmp_path, [3], after=2)
    assert [record["step"] for record in read_journal(tmp_path)] == [1, 2, 3]


def test_metrics_have_no_digits_without_a_meaning(tmp_path):
    loss, seconds = float(np.float32(1 / 3)), 1 / 7
    journal = Journal(tmp_path, after=0, tensorboard=False)
    journal.write({"step": 1, "loss": loss, "step_seconds": seconds, "tokens_per_second": 1e6 / 7})
    journal.write({"step": 1, "validation_loss": 1 / 3})
    journal.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert lines[0].endswith('"step_seconds": 0.142857, "tokens_per_second": 142857.0}')
    trained, evaluated = read_journal(tmp_path)
    assert np.float32(trained["loss"]) == np.float32(loss) and len(str(trained["loss"])) < 13
    assert evaluated["validation_loss"] == 1 / 3


def test_event_files_hold_every_number(tmp_path):
    from tensorboardX.proto.event_pb2 import Event

    journal = Journal(tmp_path, after=0, tensorboard=True)
    journal.write({"step": 7, "loss": 0.5, "mfu": None})
    journal.write_text(8, "sample", "a text")
    journal.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    data, values, texts, at = file.read_bytes(), {}, {}, 0
    while at < len(data):  # length (8 bytes), its checksum (4), the event, its checksum (4)
        size = int.from_bytes(data[at : at + 8], "little")
        event = Event.FromString(data[at + 12 : at + 12 + size])
        for value in event.summary.value:
            if value.HasField("tensor"):
                texts[value.tag] = event.step, *value.tensor.string_val
            else:
                values[value.tag] = event.step, value.simple_value
        at += 16 + size
    assert values == {"loss": (7, 0.5)}
    assert texts == {"sample/text_summary": (8, b"a text")}


def test_a_log_on_a_full_disk_does_not_hide_the_error_of_the_run(tmp_path):
    log = RunLog(tmp_path, steps=10, every=1)
    with pytest.raises(TrainingError, match="the loss is not finite"), log.recording():
        log._file = open("/dev/full", "w")  # noqa: SIM115  # the log closes it
        log.note("step 1")
        raise TrainingError("the loss is not finite")


# Writes fail as on a full disk; those to pipes do not.
FULL_DISK = """
import resource, sys
from pathlib import Path
from graphtrain.errors import TrainingError
from graphtrain.run.metrics import Journal
journal = Journal(Path(sys.argv[1]), after=0, tensorboard=True)
journal.write({"step": 7, "loss": 0.5})
resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
try:
    journal.write({"step": 8, "loss": 0.5})
except TrainingError as error:
    print(error)
journal.close()
"""


def test_a_full_disk_is_one_error_without_a_traceback_of_the_event_files(tmp_path):
    words = [sys.executable, "-c", FULL_DISK, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert "cannot be written" in done.stdout and done.stderr == ""


def test_metrics_of_a_run_without_a_checkpoint_are_moved_and_not_replaced(tmp_path):
    assert set_metrics_aside(tmp_path) is None
    write(tmp_path, [1, 2], after=0)
    message = set_metrics_aside(tmp_path)
    assert message and "but no checkpoint of it" in message and f"{tmp_path}/earlier/1" in message
    assert [record["step"] for record in read_journal(tmp_path / "earlier/1")] == [1, 2]
    assert set_metrics_aside(tmp_path) is None


def test_a_damaged_line_is_reported_once_by_all_who_read_it(tmp_path):
    write(tmp_path, [1], after=0)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("damage\n")
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        read_journal(tmp_path)
        read_again = read_journal(tmp_path)
    assert len(shown) == 1 and len(read_again) == 1


def test_a_journal_that_is_missing_is_not_called_damaged(tmp_path):
    written = {"bytes": 120, "sha256": "of another directory"}
    with pytest.warns(UserWarning, match=r"metrics.jsonl is missing, .* up to step 6.*begin anew"):
        Journal(tmp_path, after=6, tensorboard=False, written=written).close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_what_mixtures_report_is_described():
    mixture = MixtureOfExperts(experts=2, experts_per_token=1, capacity_factor=1.0)
    assert set(metric_names(mixture)) <= METRICS.keys()
