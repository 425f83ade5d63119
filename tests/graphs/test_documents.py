"""Documents kept apart in one sequence give what each gives alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import CUBE, GPT2, LLAMA, alone, batch, loaded, placed_inputs, program, state_of

from graphtrain.config.schema import Batch, Mesh, Model
from graphtrain.models.attention.segment_mask import isolate_documents
from graphtrain.models.decoder import forward, initialize
from lowering.trees import flatten
from sharding_rules.errors import ShardingError

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


def test_a_mesh_computes_what_one_device_does():
    split = program(model=LLAMA, batch=dataclasses.replace(APART, microbatches=2), **CUBE)
    results = []
    for each in (split, alone(split)):
        step = loaded(each, "gradients")
        inputs = {"state": state_of(each), "batch": batch(each)}
        placed = {name: placed_inputs(step, name, tree) for name, tree in inputs.items()}
        results.append(jax.device_get(step(placed["state"], placed["batch"])))
    got, want = results
    np.testing.assert_allclose(got["loss"], want["loss"], rtol=1e-5)
    for path, array in flatten(got["gradients"]).items():
        np.testing.assert_allclose(array, flatten(want["gradients"])[path], atol=1e-5, err_msg=path)


def test_what_cannot_keep_documents_apart_says_so():
    ring = program(batch=APART, target="cpu:2", mesh=Mesh(context=2))
    words = r"cross_document_attention = false is not supported with ring attention .*cont"
    with pytest.raises(ShardingError, match=words):
        loaded(ring, "evaluate")
    words = "cross_document_attention = false is not supported with a pipeline; set mesh"
    with pytest.raises(ValueError, match=words):
        program(batch=APART, target="cpu:2", mesh=Mesh(stage=2))
