"""What a run says at its beginning."""

from dataclasses import replace
from pathlib import Path

from graphtrain.config import load_config
from graphtrain.data.indexed.description import DatasetDescription, write_description
from graphtrain.planning.parameters import ParameterCount
from graphtrain.run.events import RunStart
from graphtrain.run.log import RunLog
from graphtrain.run.report_lines import opening_lines

CONFIG = {
    "program": {
        "target": "cpu:2",
        "model": {"layers": 1, "embed": 8, "heads": 1, "mlp": 8, "vocab": 16},
        "batch": {"global_batch_size": 4, "seq_len": 8},
    },
    "run": {"directory": "run", "steps": 10, "data": {"train": "none"}},
}


def start(data, step=0):
    config = load_config(CONFIG | {"run": CONFIG["run"] | {"data": data}})
    return RunStart(config, Path("run"), step, ParameterCount(1234))


def test_a_new_run_names_model_batch_data_machine_and_directory(make_dataset):
    prefix = make_dataset([range(16)] * 10, 16)
    described = DatasetDescription(
        tokenizer="bytes", tokenizer_digest="", tokenizer_file=None, vocab=16, eod=None,
        documents=10, tokens=160,
    )  # fmt: skip
    write_description(prefix, described)
    assert opening_lines(start({"train": prefix})) == [
        "model: 1,234 parameters",
        "batch: 32 tokens a step (4 x 8)",
        f"data: {prefix}, 160 tokens; 10 steps are 2.00 epochs",
        "machine: cpu:2",
        "directory: run, a new run, steps 1 to 10",
    ]


def test_unknown_sizes_of_data_are_left_out():
    assert opening_lines(start({"train": "none"}))[2] == "data: none"
    blend = {"train": [{"dataset": "a", "weight": 1}, {"dataset": "b", "weight": 2}]}
    assert opening_lines(start(blend))[2] == "data: a blend of a, b"


def test_a_resumed_run_names_its_step():
    assert opening_lines(start({"train": "none"}, step=4))[4] == (
        "directory: run, resumes from step 4, steps 5 to 10"
    )


def test_a_log_that_cannot_be_written_ends_no_run(tmp_path):
    log = RunLog(tmp_path / "absent", 4, 1)
    with log.recording():
        log.on_run_start(replace(start({"train": "none"}), directory=tmp_path))
        log.on_evaluate(1, {"validation_loss": 1.0})


def test_a_refused_run_writes_nothing(tmp_path):
    log = RunLog(tmp_path, 4, 1)
    with log.recording():
        log.note("waits")
    assert list(tmp_path.iterdir()) == []
