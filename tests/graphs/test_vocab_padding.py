"""Rows that pad the vocabulary change neither loss nor gradients, and are never predicted."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from graphtrain.config.schema import Model
from graphtrain.models import decoder
from graphtrain.models.chunk_losses import LossHead
from graphtrain.models.chunked_loss import chunked_cross_entropy
from graphtrain.models.loss import cross_entropy

TOKENS, ROWS = 5, 8
MODEL = Model(layers=1, embed=12, heads=2, mlp=8, vocab=TOKENS, dtype="float32", remat="none")
BATCH = jax.random.randint(jax.random.key(1), (2, 6), 0, TOKENS)
WEIGHTS = jnp.ones((2, 6))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("chunk", [None, 3])
def test_loss_and_gradients_are_those_without_padding(tied, chunk):
    model = replace(MODEL, tie_word_embeddings=tied, final_logit_softcap=3.0)
    padded = replace(model, vocab=ROWS, vocab_padding=ROWS - TOKENS)
    parameters = decoder.initialize(padded, jax.random.key(0))
    cut = jax.tree.map_with_path(_without_padding, parameters)

    def loss(parameters, model):
        if chunk is None:
            logits, _ = decoder.forward(model, parameters, BATCH)
            return cross_entropy(logits, BATCH, WEIGHTS)[0]
        hidden, head, _ = decoder.head_inputs(model, parameters, BATCH)
        settings = LossHead(chunk, tied, 3.0, 0.0, model.vocab_tokens)
        return chunked_cross_entropy(hidden, head, BATCH, WEIGHTS, settings)[0]

    found, gradients = jax.value_and_grad(loss)(parameters, padded)
    wanted, expected = jax.value_and_grad(loss)(cut, model)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    for path, gradient in jax.tree.leaves_with_path(gradients):
        if any(key.key in ("head", "tokens") for key in path):
            axis = 0 if gradient.shape[0] == ROWS else 1
            assert not np.take(gradient, range(TOKENS, ROWS), axis).any()
    cut_gradients = jax.tree.map_with_path(_without_padding, gradients)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), cut_gradients, expected
    )


def test_padding_is_never_predicted():
    padded = replace(MODEL, vocab=ROWS, vocab_padding=ROWS - TOKENS)
    logits, _ = decoder.forward(padded, decoder.initialize(padded, jax.random.key(0)), BATCH)
    assert not np.asarray(jax.nn.softmax(logits))[..., TOKENS:].any()


def _without_padding(path, array):
    """Cut the rows of the padding from the embedding and from the head."""
    name = path[-1].key
    if name == "tokens":
        return array[:TOKENS]
    return array[:, :TOKENS] if name == "head" else array
