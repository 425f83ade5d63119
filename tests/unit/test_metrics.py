import warnings

import pytest

from graphtrain.errors import TrainingError
from graphtrain.run.earlier_runs import set_metrics_aside
from graphtrain.run.log import RunLog
from graphtrain.run.metrics import Journal, read_journal


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


def test_event_files_hold_every_number(tmp_path):
    from tensorboardX.proto.event_pb2 import Event

    journal = Journal(tmp_path, after=0, tensorboard=True)
    journal.write({"step": 7, "loss": 0.5, "mfu": None})
    journal.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    data, values, at = file.read_bytes(), {}, 0
    while at < len(data):  # length (8 bytes), its checksum (4), the event, its checksum (4)
        size = int.from_bytes(data[at : at + 8], "little")
        event = Event.FromString(data[at + 12 : at + 12 + size])
        values |= {value.tag: (event.step, value.simple_value) for value in event.summary.value}
        at += 16 + size
    assert values == {"loss": (7, 0.5)}


def test_a_log_on_a_full_disk_does_not_hide_the_error_of_the_run(tmp_path):
    log = RunLog(tmp_path, steps=10, every=1)
    with pytest.raises(TrainingError, match="the loss is not finite"), log.recording():
        log._file = open("/dev/full", "w")  # noqa: SIM115  # the log closes it
        log.note("step 1")
        raise TrainingError("the loss is not finite")


def test_event_files_that_cannot_be_flushed_do_not_hide_the_error_of_the_run(tmp_path, monkeypatch):
    def fail():
        raise OSError(28, "No space left on device")

    journal = Journal(tmp_path, after=0, tensorboard=True)
    journal.write({"step": 7, "loss": 0.5})
    monkeypatch.setattr(journal._tensorboard_writer, "close", fail)
    journal.close()


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
