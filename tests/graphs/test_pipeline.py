"""A program in stages gives the numbers of one device, by every schedule and beside every split."""

import dataclasses

import jax
import numpy as np
import pytest
from programs import (
    GEMMA,
    GPT2,
    LLAMA,
    alone,
    batch,
    loaded,
    placed_inputs,
    program,
    state_of,
    stored,
)
from test_parallel import assert_close, loss_and_gradients

from graphtrain.config.schema import Batch, Mesh, PipelineSettings
from lowering.trees import flatten, unflatten
from sharding_rules.pipeline import divide_layers

DEEP = {
    "llama": dataclasses.replace(LLAMA, layers=8),
    "gpt2": dataclasses.replace(GPT2, layers=8),
    "gemma": dataclasses.replace(GEMMA, layers=8),
}
GPIPE, ONE_ONE = PipelineSettings(schedule="gpipe"), PipelineSettings(schedule="1f1b")
CIRCULAR = PipelineSettings(virtual_stages=2)
SELECTIVE = PipelineSettings(virtual_stages=2, recompute_stages=False)
CUBE = Mesh(data=2, stage=2, tensor=2)
EIGHT = Batch(global_batch_size=32, seq_len=16, microbatches=8)
DEFAULT = program().rules
CASES = {
    "gpipe": (GPIPE, Mesh(stage=8), DEFAULT),
    "1f1b": (ONE_ONE, Mesh(stage=8), DEFAULT),
    "circular": (CIRCULAR, Mesh(stage=4, data=2), DEFAULT),
    "circular, 4 rounds": (PipelineSettings(virtual_stages=4), Mesh(stage=2, fsdp=4), DEFAULT),
    "gpipe, cube": (GPIPE, CUBE, DEFAULT),
    "circular, cube": (CIRCULAR, CUBE, DEFAULT),
    "1f1b, cube": (ONE_ONE, CUBE, DEFAULT),
    "1f1b, tensor without sequence": (ONE_ONE, CUBE, ("data", "pipeline", "tensor")),
    "circular, data and fsdp": (CIRCULAR, Mesh(data=2, fsdp=2, stage=2), DEFAULT),
    "1f1b, fsdp and tensor": (ONE_ONE, Mesh(fsdp=2, stage=2, tensor=2), DEFAULT),
    "gpipe, zero2": (GPIPE, Mesh(data=4, stage=2), ("zero2", "pipeline")),
    "1f1b, zero2": (ONE_ONE, Mesh(data=4, stage=2), ("zero2", "pipeline")),
    "1f1b, vocabulary": (ONE_ONE, CUBE, (*DEFAULT, "stage_vocab")),
    "circular, context": (CIRCULAR, Mesh(stage=2, context=2, tensor=2), DEFAULT),
    "1f1b, expert": (ONE_ONE, Mesh(data=2, stage=2, expert=2), DEFAULT),
    "gpipe, uneven": (
        PipelineSettings(schedule="gpipe", layers_per_stage=(1, 3, 3, 1)),
        Mesh(stage=4),
        DEFAULT,
    ),
    "circular, uneven": (
        PipelineSettings(virtual_stages=2, layers_per_stage=(1, 3, 2, 2)),
        CUBE,
        DEFAULT,
    ),
    "1f1b, uneven": (PipelineSettings(schedule="1f1b", layers_per_stage=(5, 3)), CUBE, DEFAULT),
    "interleaved": (
        PipelineSettings(schedule="1f1b", virtual_stages=2),
        Mesh(stage=4),
        DEFAULT,
    ),
    "interleaved, 4 rounds": (
        PipelineSettings(schedule="1f1b", virtual_stages=4),
        Mesh(data=2, stage=2, fsdp=2),
        DEFAULT,
    ),
    "interleaved, uneven": (
        PipelineSettings(schedule="1f1b", virtual_stages=2, layers_per_stage=(1, 3, 2, 2)),
        CUBE,
        DEFAULT,
    ),
}


def in_stages(pipeline, mesh, rules=DEFAULT, **settings):
    devices = int(np.prod(list(vars(mesh).values())))
    settings = {"model": DEEP["llama"], "batch": EIGHT} | settings
    return program(target=f"cpu:{devices}", mesh=mesh, rules=rules, pipeline=pipeline, **settings)


def assert_equals_one_device(of):
    want = unflatten(loss_and_gradients(alone(of)))
    assert_close(loss_and_gradients(of), flatten(stored(of, want)))


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_equal_those_of_one_device(case):
    assert_equals_one_device(in_stages(*CASES[case]))


@pytest.mark.parametrize("case", ["circular, cube", "gpipe, uneven", "interleaved, uneven"])
def test_a_tied_head_and_biases_have_the_gradients_of_one_device(case):
    assert_equals_one_device(in_stages(*CASES[case], model=DEEP["gpt2"]))


@pytest.mark.parametrize("case", ["circular, uneven", "1f1b, cube"])
def test_layers_with_and_without_a_window_have_the_gradients_of_one_device(case):
    assert_equals_one_device(in_stages(*CASES[case], model=DEEP["gemma"]))


@pytest.mark.parametrize(
    ("pipeline", "remat"),
    [(CIRCULAR, "full"), (GPIPE, "dots"), (SELECTIVE, "dots")],
    ids=["circular", "gpipe", "selective"],
)
def test_recomputed_stages_have_the_gradients_of_one_device(pipeline, remat):
    model = dataclasses.replace(DEEP["llama"], remat=remat)
    assert_equals_one_device(in_stages(pipeline, CUBE, model=model))


@pytest.mark.parametrize("pipeline", [GPIPE, CIRCULAR, ONE_ONE], ids=lambda one: one.schedule)
def test_layers_drop_what_they_would_on_one_device(pipeline):
    model = dataclasses.replace(DEEP["llama"], dropout=0.2)
    assert_equals_one_device(in_stages(pipeline, CUBE, model=model))


def test_layers_that_do_not_divide_leave_less_to_the_outer_stages():
    of = in_stages(ONE_ONE, Mesh(stage=4, data=2), model=dataclasses.replace(LLAMA, layers=6))
    assert divide_layers(6, 4).layers == (1, 2, 2, 1)
    assert_equals_one_device(of)


@pytest.mark.parametrize("case", ["gpipe, uneven", "circular, cube"])
def test_weights_do_not_depend_on_the_stages(case):
    of = in_stages(*CASES[case])
    state, whole = (
        jax.device_get(loaded(each, "init", optimized=True)(np.uint32(0))["state"])
        for each in (of, alone(of))
    )
    wanted = flatten(stored(of, whole))
    for path, array in flatten(state).items():
        np.testing.assert_array_equal(array, wanted[path], err_msg=path)


@pytest.mark.parametrize("sequences", [32, 8], ids=["split", "filled up"])
@pytest.mark.parametrize("case", ["1f1b, cube", "circular, uneven"])
def test_evaluation_equals_that_of_one_device(case, sequences):
    pipeline, mesh, rules = CASES[case]
    size = Batch(global_batch_size=sequences, seq_len=16, microbatches=4)
    of = in_stages(pipeline, mesh, rules, batch=size)
    one = {name: array[0] for name, array in batch(of).items()}
    losses = []
    for each in (alone(of), of):
        evaluate = loaded(each, "evaluate")
        parameters = placed_inputs(evaluate, "parameters", state_of(each)["parameters"])
        metrics = evaluate(parameters, placed_inputs(evaluate, "batch", one))["metrics"]
        losses.append(float(metrics["loss_sum"]))
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


@pytest.mark.parametrize("case", ["1f1b, cube", "circular, uneven"])
def test_a_step_updates_weights_as_on_one_device_and_leaves_zeros_zero(case):
    of = in_stages(*CASES[case])
    states = []
    for each in (alone(of), of):
        train = loaded(each, "train")
        state = placed_inputs(train, "state", state_of(each))
        outputs = train(state, placed_inputs(train, "batch", batch(of)), np.float32(0.1))
        states.append(jax.device_get(outputs))
    norms = [float(output["metrics"]["grad_norm"]) for output in states]
    np.testing.assert_allclose(norms[1], norms[0], rtol=1e-5)
    want = flatten(stored(of, states[0]["state"]["parameters"]))
    for path, array in flatten(states[1]["state"]["parameters"]).items():
        # Adam divides by the root of a square: rounding of small gradients shows in its first step.
        np.testing.assert_allclose(array, want[path], atol=1e-3, err_msg=path)
        np.testing.assert_array_equal(array[want[path] == 0], 0, err_msg=path)
