"""Steps that are left undone: limits as inputs, and the old state bit for bit on every mesh."""

import dataclasses

import jax
import numpy as np
import pytest
from programs import CUBE, LLAMA, batch, loaded, placed_inputs, program, state_of

from graphtrain.config.resolve import resolve
from graphtrain.config.schema import Batch, Mesh, Optimizer, PipelineSettings, Precision
from graphtrain.graphs.build import build_graph
from graphtrain.run.spikes import Limits
from lowering.trees import flatten

SKIPS = {"optimizer": Optimizer(skip_spikes=True)}
TWO = Batch(global_batch_size=8, seq_len=16, microbatches=2)
PIPELINE = {
    "target": "cpu:2",
    "mesh": Mesh(stage=2),
    "pipeline": PipelineSettings(schedule="1f1b"),
}


def step(of, state, limits):
    train = loaded(of, "train")
    inputs = placed_inputs(train, "state", state), placed_inputs(train, "batch", batch(of))
    outputs = train(*inputs, np.float32(1e-3), limits.arrays())
    metrics = {name: float(value) for name, value in outputs["metrics"].items()}
    return jax.device_get(outputs["state"]), metrics


def differing(before, after):
    before, after = flatten(before), flatten(after)
    return {name for name in before if not np.array_equal(before[name], after[name])}


@pytest.mark.parametrize("settings", [CUBE, PIPELINE], ids=["cube", "1f1b"])
def test_a_step_above_a_limit_changes_only_its_number(settings):
    of = program(**SKIPS, batch=TWO, **settings)
    before = state_of(of)
    done, metrics = step(of, before, Limits())
    assert metrics["spike"] == 0
    assert differing(before, done) > {"step"}
    for limits in (Limits(loss=metrics["loss"] * 0.999), Limits(grad_norm=0.0)):
        skipped, metrics = step(of, before, limits)
        assert metrics["spike"] == 1
        assert differing(before, skipped) == {"step"}
    equal, _ = step(of, before, Limits(metrics["loss"], metrics["grad_norm"]))  # not above them
    assert not differing(done, equal)


def test_an_overflow_still_lowers_the_loss_scale_and_a_spike_does_not():
    scale = Precision(initial_scale=1e30)
    of = program(**SKIPS, model=dataclasses.replace(LLAMA, dtype="float16"), precision=scale)
    before = state_of(of)
    overflowed, metrics = step(of, before, Limits())
    assert differing(before, overflowed) == {
        "step", "loss_scale/scale", "loss_scale/skipped_steps",
    }  # fmt: skip
    before["loss_scale"]["scale"] = np.float32(8)
    spiked, metrics = step(of, before, Limits(loss=0.0))
    assert np.isfinite(metrics["grad_norm"])
    assert differing(before, spiked) == {"step"}


def test_a_program_without_the_setting_has_no_limits():
    graphs = [build_graph(resolve(program(**settings)), "train") for settings in ({}, SKIPS)]
    assert ["limits" in graph.inputs for graph in graphs] == [False, True]
    assert ["spike" in graph.outputs["metrics"] for graph in graphs] == [False, True]
