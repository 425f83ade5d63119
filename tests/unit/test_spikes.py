"""Limits of loss and gradient norm: which steps are spikes, and that a resumed run agrees."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from graphtrain.config.schema import Batch, Config, Data, Model, Optimizer, Program, Run, Spikes
from graphtrain.run.spikes import Limits, SpikeRecord, SpikeWindow, rewinds_to, write_spike

MODEL = Model(layers=1, embed=8, heads=2, mlp=16, vocab=32)
PROGRAM = Program(model=MODEL, batch=Batch(global_batch_size=2, seq_len=8))
RUN = Run(directory="run", steps=4, data=Data(train="data/train"))


def metrics(loss, norm, **more):
    return {"loss": np.float32(loss), "grad_norm": np.float32(norm), **more}


@pytest.mark.parametrize(
    ("loss", "norm", "is_spike"),
    [(2, 3, False), (2.1, 3, True), (2, 3.1, True), (math.nan, 1, True), (1, -math.inf, True)],
)
def test_a_step_above_a_limit_or_not_finite_is_a_spike(loss, norm, is_spike):
    assert Limits(2, 3).exceeded_by(metrics(loss, norm)) == is_spike
    assert not Limits(2, 3).exceeded_by(metrics(loss, norm, spike=0.0))  # the program decided


def test_a_run_without_limits_has_only_steps_that_are_not_finite_as_spikes():
    limits = SpikeWindow(Spikes()).limits(1)
    assert limits == Limits() and not limits.exceeded_by(metrics(1e38, 1e38))


def test_the_limit_of_the_loss_follows_from_a_full_window_of_steps_before_the_last():
    window = SpikeWindow(Spikes(loss_zscore=2, window=3))
    for step, loss in enumerate([1.0, 2.0, 3.0, 100.0], 1):
        window.accept(step, loss)
        assert window.limits(step + 1).loss == (
            math.inf if step < 4 else np.float32(2 + 2 * np.std([1, 2, 3]))
        )
    assert window.limits(6).loss == np.float32(35 + 2 * np.std([2, 3, 100]))


def test_the_limits_are_the_same_whenever_the_last_step_is_read_and_after_a_resumption():
    settings = Spikes(loss_zscore=1.5, window=4)
    early, late, resumed = (SpikeWindow(settings) for _ in range(3))
    for step in range(1, 30):
        loss = float(np.float32(math.sin(step)))
        early.accept(step, loss)
        expected = early.limits(step + 1)
        assert late.limits(step + 1) == expected
        late.accept(step, loss)
        resumed = SpikeWindow(settings, json.loads(json.dumps(resumed.state())))
        resumed.accept(step, loss)
        assert resumed.limits(step + 1) == expected


def test_skipped_steps_in_a_row_are_counted_across_a_resumption():
    settings = Spikes(max_consecutive=2)
    window = SpikeWindow(settings)
    assert [window.skip(), window.skip()] == [False, False]
    assert SpikeWindow(settings, window.state()).skip()
    window.accept(3, 1.0)
    assert not window.skip()


def test_skip_needs_a_program_that_takes_limits():
    skips, rewinds = (replace(RUN, spikes=Spikes(on_spike=name)) for name in ("skip", "rewind"))
    with pytest.raises(ValueError, match=r"needs program\.optimizer\.skip_spikes = true"):
        Config(program=PROGRAM, run=skips)
    Config(program=replace(PROGRAM, optimizer=Optimizer(skip_spikes=True)), run=skips)
    Config(program=PROGRAM, run=rewinds)


def test_rewinds_are_read_back_by_checkpoint_and_damaged_lines_are_not(tmp_path):
    assert rewinds_to(tmp_path, 3) == []
    for checkpoint, sample in ((3, 20), (6, 40), (3, 24)):
        facts = checkpoint + 1, "rewind", None, 1.0, None, None, {"data": [1]}
        data = {"step": checkpoint, "sample": sample}
        write_spike(tmp_path, SpikeRecord(*facts, checkpoint=checkpoint, data=data))
    with (tmp_path / "spikes.jsonl").open("a") as file:
        file.write('{"on_spike": "rewind", "checkpoint": 3, "data": 5}\n[1]\n{"on_spi')
    assert [one["sample"] for one in rewinds_to(tmp_path, 3)] == [20, 24]
