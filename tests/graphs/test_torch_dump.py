"""Dumps of imported models beside eager PyTorch: outputs of modules, by the modules' names."""

import dataclasses

import jax
import numpy as np
import pytest
from programs import batch, loaded, placed_inputs, program, stored
from test_dump import stored as stored_dump
from test_torch_models import eager_loss, module_of, state_of
from torch_families import imported

from graphtrain.config.resolve import resolve
from graphtrain.config.schema import Batch, Mesh, PipelineSettings
from graphtrain.run.dumps.compare import compare_arrays, compare_dumps
from graphtrain.run.dumps.eager import eager_arrays
from graphtrain.run.dumps.host_arrays import host_arrays
from lowering.trees import flatten

RATE = np.float32(1e-3)
DEEP = {"llama": {"num_hidden_layers": 4}, "gpt2": {"n_layer": 4}}
FAULTS = {  # weights of a module that all blocks have, and the first array that differs
    "llama": (
        "model/layers/mlp/up_proj/",
        "forward/model/layers/2/mlp/up_proj",
    ),
    "gpt2": (
        "transformer/h/mlp/c_proj/",
        "forward/transformer/h/2/mlp/c_proj",
    ),
}


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_outputs_of_modules_and_their_gradients_are_those_of_eager_pytorch(kind, tmp_path):
    of = program(model=imported(tmp_path, kind), batch=Batch(global_batch_size=8, seq_len=12))
    module, inputs = module_of(of), batch(of)
    step = loaded(of, "dump")
    placed = placed_inputs(step, "state", state_of(of, module))
    outputs = jax.device_get(step(placed, placed_inputs(step, "batch", inputs), RATE))
    mine = host_arrays(resolve(of), step.record, outputs)
    theirs = eager_arrays(module, lambda: eager_loss(module, inputs), inputs["tokens"][0].shape)
    common = [name for name in theirs if name in mine]
    assert sum(name.startswith("forward/") for name in common) >= 2 * 6
    assert sum(name.startswith("backward/") for name in common) >= 2 * 6
    assert {name for name in theirs if name.startswith("gradients/")} <= set(mine)
    for name in common:
        assert compare_arrays(theirs[name], mine[name])["relative"] < 2e-5, name


def in_stages(folder, kind, schedule, **settings):
    """A program of an imported model with two stages of two blocks, and that of one device."""
    one = program(
        model=imported(folder, kind, overrides=DEEP[kind]),
        batch=Batch(global_batch_size=8, seq_len=8),
    )
    many = dataclasses.replace(
        one,
        target="cpu:4",
        mesh=Mesh(stage=2, data=2),
        batch=Batch(global_batch_size=8, seq_len=8, microbatches=4),
        pipeline=PipelineSettings(schedule=schedule),
        **settings,
    )
    return one, many


def dumped(of, rows, state):
    """The arrays of a dump of an imported model, by name."""
    step = loaded(of, "dump")
    inputs = {k: v.reshape(of.batch.microbatches, -1, v.shape[-1]) for k, v in rows.items()}
    placed = placed_inputs(step, "state", stored(of, state))
    outputs = jax.device_get(step(placed, placed_inputs(step, "batch", inputs), RATE))
    return host_arrays(resolve(of), step.record, outputs)


@pytest.mark.parametrize(("kind", "schedule"), [("llama", "1f1b"), ("gpt2", "gpipe")])
def test_arrays_of_a_pipeline_are_those_of_one_device_and_a_planted_fault_is_found(
    kind, schedule, tmp_path
):
    one, many = in_stages(tmp_path, kind, schedule)
    state, rows = state_of(one, module_of(one)), batch(one)
    right = dumped(one, rows, state)
    wrong = dumped(many, rows, state)
    assert list(right) == list(wrong) and len(right) > 100
    for name in right:
        assert compare_arrays(right[name], wrong[name])["relative"] < 2e-5, name
    module, expected = FAULTS[kind]
    for path, weights in flatten(state["parameters"]).items():
        if path.startswith(module):
            weights[2] *= 1.01  # of the third block
    wrong = stored_dump(tmp_path / "wrong", dumped(many, rows, state), {})
    first = compare_dumps(stored_dump(tmp_path / "right", right, {}), wrong).first
    assert first is not None and first.name == expected
    assert first.relative == pytest.approx(0.01, rel=0.1)
