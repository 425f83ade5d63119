"""Lookup of token embeddings, and its gradient."""

import jax
import jax.numpy as jnp
import numpy as np

from graphtrain.models.decoder import embedding_lookup

TABLE = jnp.ones((16, 4))
TOKENS = np.array([[[0, 3], [3, 5]], [[5, 0], [7, 7]], [[1, 2], [3, 4]]])  # microbatch, batch, seq


def summed(table):
    def rows(tokens):
        return embedding_lookup(table, tokens, "float32", False)

    return jax.vmap(rows)(jnp.asarray(TOKENS)).sum()


def test_the_gradient_counts_how_often_each_token_was_looked_up():
    counts = np.bincount(TOKENS.ravel(), minlength=16)
    np.testing.assert_array_equal(jax.grad(summed)(TABLE), np.repeat(counts[:, None], 4, 1))


def test_microbatches_of_a_pipeline_have_one_gradient_of_the_embedding_together():
    assert "f32[3,16,4]" not in str(jax.make_jaxpr(jax.grad(summed))(TABLE))
