"""Mixtures balanced by a bias: its gradient is the load, and the step moves it against that."""

import dataclasses

import jax
import numpy as np
import pytest
from programs import LLAMA, batch, loaded, placed_inputs, program, state_of
from test_parallel import assert_close, loss_and_gradients
from test_pipeline import GPIPE, assert_equals_one_device

from graphtrain.config.schema import Batch, Mesh, MixtureOfExperts, PipelineSettings

MIXTURE = MixtureOfExperts(
    experts=8,
    experts_per_token=2,
    score_function="sigmoid",
    bias_update_rate=0.01,
    groups=4,
    groups_per_token=2,
    routed_scaling_factor=2.5,
    shared_expert_mlp=24,
    shared_expert_gate=False,
    dense_layers=2,
    dense_mlp=40,
    balance_loss=1e-4,
)
MODEL = dataclasses.replace(LLAMA, moe=MIXTURE, init_std=0.3)
INTERLEAVED = PipelineSettings(schedule="1f1b", virtual_stages=2, layers_per_stage=(1, 2, 1, 1))
BATCH = Batch(global_batch_size=16, seq_len=16, microbatches=2)
BIAS = "layers/mlp/selection_bias"


def balanced(**settings):
    return program(model=MODEL, batch=BATCH, **settings)


def test_load_and_gradients_equal_those_of_one_device():
    split = balanced(target="cpu:8", mesh=Mesh(fsdp=2, expert=2, tensor=2))
    got, want = loss_and_gradients(split), loss_and_gradients(balanced())
    assert_close(got, want)
    load = want[f"gradients/{BIAS}"]
    np.testing.assert_array_equal(load.sum(-1), [16 * 16 * 2] * 2)  # choices of all tokens
    np.testing.assert_array_equal(got[f"gradients/{BIAS}"], load)


def test_a_module_for_further_tokens_has_the_gradients_of_one_device():
    ahead = dataclasses.replace(MODEL, mtp_loss_weight=0.3)
    sizes = {"model": ahead, "batch": dataclasses.replace(BATCH, cross_document_attention=False)}
    split = program(target="cpu:8", mesh=Mesh(fsdp=2, expert=2, tensor=2), **sizes)
    got, want = loss_and_gradients(split), loss_and_gradients(program(**sizes))
    assert_close(got, want)
    assert want["mtp_loss"] > 0 and want["gradients/ahead/projection"].any()


@pytest.mark.parametrize(
    ("pipeline", "layers"),
    [(GPIPE, 2), (INTERLEAVED, 5)],
    ids=["gpipe", "1f1b, with rows of no layer"],
)
def test_ticks_without_a_microbatch_add_no_load(pipeline, layers):
    mesh, model = Mesh(data=2, stage=2, expert=2), dataclasses.replace(MODEL, layers=layers)
    settings = {"target": "cpu:8", "mesh": mesh, "pipeline": pipeline}
    assert_equals_one_device(program(model=model, batch=BATCH, **settings))


def test_a_step_moves_the_bias_against_the_load_and_no_moment():
    of = balanced()
    train = loaded(of, "train")
    inputs = [placed_inputs(train, "state", state_of(of)), placed_inputs(train, "batch", batch(of))]
    out = jax.device_get(train(*inputs, np.float32(1e-3)))
    gradients = loss_and_gradients(of)
    load = gradients.pop(f"gradients/{BIAS}")
    want = 0.01 * np.sign(load.mean(-1, keepdims=True) - load)
    state = out["state"]
    np.testing.assert_allclose(state["parameters"]["layers"]["mlp"]["selection_bias"], want)
    for moment in state["optimizer"]["adam"].values():
        if isinstance(moment, dict):
            assert not moment["layers"]["mlp"]["selection_bias"].any()
    squares = [np.square(one).sum() for path, one in gradients.items() if "gradients/" in path]
    np.testing.assert_allclose(out["metrics"]["grad_norm"], np.sqrt(sum(squares)), rtol=1e-5)
