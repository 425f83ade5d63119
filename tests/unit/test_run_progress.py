"""Speeds that a run reports are means over the reported steps."""

import re

from graphtrain.cli.compile import progress as compilation_progress
from graphtrain.cli.run_progress import progress_reporter


def record(step, seconds, tokens=1000, mfu_at_one_second=0.2):
    return {
        "step": step,
        "loss": 4.0,
        "grad_norm": 1.0,
        "learning_rate": 1e-3,
        "step_seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "mfu": mfu_at_one_second / seconds,
    }


def lines(capsys, records, every=2):
    with progress_reporter(steps=4, every=every) as progress:
        for one in records:
            event = progress.on_evaluate if "validation_loss" in one else progress.on_step
            event(one["step"], one)
    return capsys.readouterr().err.splitlines()


def test_two_results_that_arrive_together_do_not_report_an_impossible_speed(capsys):
    (line,) = lines(capsys, [record(1, 1.99), record(2, 0.01)])
    assert "1,000 tokens/s" in line
    assert "mfu 20.0%" in line


def test_each_line_has_the_mean_of_its_own_steps(capsys):
    first, second = lines(capsys, [record(1, 1), record(2, 1), record(3, 4), record(4, 4)])
    assert [re.search(r"([\d,]+) tokens/s", line)[1] for line in (first, second)] == [
        "1,000",
        "250",
    ]


def test_an_evaluation_between_two_lines_does_not_reset_the_mean(capsys):
    evaluation = {"step": 1, "validation_loss": 5.0}
    validation, line = lines(capsys, [record(1, 1.99), evaluation, record(2, 0.01)])
    assert validation == "step 1/4  validation loss 5.0000"
    assert "1,000 tokens/s" in line


def test_an_unknown_utilization_is_not_shown(capsys):
    unknown = record(1, 1.0) | {"mfu": None}
    (line,) = lines(capsys, [unknown], every=1)
    assert "mfu" not in line


STAGES = ("queued", "starting", "tracing", "compiling", "storing after 0.1 s", "compiled")


def test_a_command_that_is_not_about_compiling_reports_only_what_it_compiles(capsys):
    with compilation_progress(is_main=False) as observe:
        observe("prefill", "cached")
        for stage in STAGES:
            observe("decode", stage)
    assert capsys.readouterr().err == "decode: compiling\n"


def test_a_command_that_compiles_reports_every_stage(capsys):
    with compilation_progress() as observe:
        for stage in STAGES:
            observe("train", stage)
    assert capsys.readouterr().err.splitlines() == [f"train: {stage}" for stage in STAGES]
