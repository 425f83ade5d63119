"""Documents kept apart in one sequence give what each gives alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import (
    GEMMA,
    GPT2,
    LLAMA,
    batch,
    loaded,
    placed_inputs,
    program,
    state_of,
    stored,
)
from test_parallel import assert_close, loss_and_gradients

from graphtrain.config.schema import Batch, Mesh, Model, PipelineSettings
from graphtrain.models.attention.segment_mask import isolate_documents
from graphtrain.models.decoder import forward, initialize
from lowering.trees import flatten, unflatten

MODELS = {"llama": LLAMA, "gpt2": GPT2, "gemma": GEMMA}
ALIBI = dataclasses.replace(LLAMA, positions="alibi", remat="full")
SIZES = [5, 1, 7, 3]
LENGTH = sum(SIZES)
APART = Batch(global_batch_size=8, seq_len=16, cross_document_attention=False)


TOKENS = np.random.default_rng(1).integers(0, LLAMA.vocab, LENGTH)


def packed(model: Model, parameters):
    """Logits of one sequence of all documents."""
    numbers = np.repeat([1, 2, 3, 4], SIZES)[None]
    with isolate_documents(jnp.asarray(numbers)):
        return forward(model, parameters, TOKENS[None])[0][0]


def separate(model: Model, parameters):
    """Logits of each document from a row of its own; what follows it there is not seen by it."""
    begins = np.cumsum([0, *SIZES])[:-1]
    rolled = np.stack([np.roll(TOKENS, -begin) for begin in begins])
    each, _ = forward(model, parameters, rolled)
    return jnp.concatenate([row[:size] for row, size in zip(each, SIZES, strict=True)])


@pytest.mark.parametrize("model", [GPT2, ALIBI], ids=["learned", "alibi"])
def test_logits_are_those_of_each_document_alone(model: Model):
    parameters = jax.jit(initialize, static_argnums=0)(model, jax.random.key(0))
    got, want = jax.jit(lambda p: [of(model, p) for of in (packed, separate)])(parameters)
    np.testing.assert_allclose(got, want, atol=2e-5)


def test_gradients_are_those_of_each_document_alone():
    parameters = jax.jit(initialize, static_argnums=0)(LLAMA, jax.random.key(0))

    def square(of):
        return jax.value_and_grad(lambda p: (of(LLAMA, p) ** 2).sum())

    both = jax.jit(lambda p: [square(of)(p) for of in (packed, separate)])
    (got, got_gradients), (want, want_gradients) = both(parameters)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    for path, array in flatten(got_gradients).items():
        np.testing.assert_allclose(array, flatten(want_gradients)[path], atol=2e-4, err_msg=path)


DEEP = {name: dataclasses.replace(model, layers=4) for name, model in MODELS.items()}
GPIPE, ONE_ONE = PipelineSettings(schedule="gpipe"), PipelineSettings(schedule="1f1b")
INTERLEAVED = PipelineSettings(schedule="1f1b", virtual_stages=2)
ULYSSES = ("data", "pipeline", "ulysses")
MESHES = {
    "cube": ("llama", Mesh(data=2, fsdp=2, tensor=2), {}),
    "ring, tensor": ("gemma", Mesh(context=2, tensor=2), {}),
    "ring": ("gpt2", Mesh(context=4), {}),
    "gpipe, ring": ("gpt2", Mesh(stage=2, context=2), {"pipeline": GPIPE}),
    "circular": ("llama", Mesh(stage=2, data=2), {"pipeline": PipelineSettings(virtual_stages=2)}),
    "1f1b": ("gemma", Mesh(stage=4), {"pipeline": ONE_ONE}),
    "1f1b, ring": ("gemma", Mesh(stage=2, context=2), {"pipeline": ONE_ONE}),
    "1f1b, ulysses": ("llama", Mesh(stage=2, context=2), {"pipeline": ONE_ONE, "rules": ULYSSES}),
    "interleaved": ("gpt2", Mesh(data=2, stage=2, fsdp=2), {"pipeline": INTERLEAVED}),
}


@pytest.mark.parametrize("name", MESHES)
def test_a_mesh_computes_what_one_device_does(name):
    kind, mesh, settings = MESHES[name]
    sizes = dataclasses.replace(APART, global_batch_size=16, microbatches=4)
    one = program(model=DEEP[kind], batch=sizes)
    devices = int(np.prod(list(vars(mesh).values())))
    split = dataclasses.replace(one, target=f"cpu:{devices}", mesh=mesh, **settings)
    want = flatten(stored(split, unflatten(loss_and_gradients(one))))
    assert_close(loss_and_gradients(split), want)


@pytest.mark.parametrize("name", ["1f1b", "ring, tensor"])
def test_evaluation_isolates_documents_too(name):
    kind, mesh, settings = MESHES[name]
    one = program(model=DEEP[kind], batch=APART)
    sizes = dataclasses.replace(APART, global_batch_size=32, microbatches=4)
    devices = int(np.prod(list(vars(mesh).values())))
    split = dataclasses.replace(one, target=f"cpu:{devices}", mesh=mesh, batch=sizes, **settings)
    inputs = {name: array[0] for name, array in batch(one).items()}
    losses = []
    for each in (one, split):
        evaluate = loaded(each, "evaluate")
        parameters = placed_inputs(evaluate, "parameters", state_of(each)["parameters"])
        metrics = evaluate(parameters, placed_inputs(evaluate, "batch", inputs))["metrics"]
        losses.append(float(metrics["loss_sum"]))
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
