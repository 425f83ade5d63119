"""Products of few activations with weights, in the orders in which XLA:CPU is fast."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from graphtrain.models.decoder import embedding_lookup
from graphtrain.models.matmul import dot, dot_many, few_rows
from lowering.machine import host
from lowering.machine.target import Target
from lowering.tracing.cpu_hints import KEEP_OPTIMIZATION_BARRIERS
from lowering.tracing.current_target import trace_for_target


def draw(random: np.random.Generator, *shape: int) -> jax.Array:
    """Numbers of bfloat16, so that no operand is rounded."""
    return jnp.array(random.standard_normal(shape), jnp.bfloat16).astype(jnp.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [(1, 1), (8, 1), (1, 5)])
@pytest.mark.parametrize(
    ("equation", "x_shape", "weights_shape"),
    [
        ("bse,ehd->bshd", (24,), (24, 3, 8)),
        ("bshd,hde->bse", (3, 8), (3, 8, 24)),
        ("bse,ve->bsv", (24,), (40, 24)),
    ],
)
def test_a_product_is_that_of_einsum(equation, x_shape, weights_shape, rows, dtype):
    random = np.random.default_rng(0)
    x, weights = draw(random, *rows, *x_shape), draw(random, *weights_shape)

    @jax.jit
    def product(x, weights):
        with few_rows(), trace_for_target(Target.parse("cpu:1")):
            return dot(equation, x, weights), *dot_many(equation, x, [weights])

    for got in product(x, weights.astype(dtype)):
        assert got.dtype == jnp.float32
        want = np.einsum(equation, np.asarray(x, np.float64), np.asarray(weights, np.float64))
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_fast", [True, False])
def test_a_row_is_multiplied_alike_among_few_and_many(is_fast, monkeypatch):
    """Many rows may be multiplied in float32: x is rounded to bfloat16 as in few rows."""
    monkeypatch.setattr(host, "has_fast_bfloat16", lambda: is_fast)
    random = np.random.default_rng(0)
    x = jnp.asarray(random.standard_normal((1, 128, 24)), jnp.float32)
    weights = draw(random, 24, 40).astype(jnp.bfloat16)

    @jax.jit
    def product(x, weights):
        with few_rows(), trace_for_target(Target.parse("cpu:1")):
            return dot("bse,ef->bsf", x, weights)

    compiled = product.lower(x, weights).compile(KEEP_OPTIMIZATION_BARRIERS)
    assert ("= f32[40,24]" in compiled.as_text()) != is_fast  # weights are converted
    few = product(x[:, :8], weights)
    np.testing.assert_allclose(compiled(x, weights)[:, :8], few, rtol=1e-6, atol=1e-6)
    unrounded = np.einsum("bse,ef->bsf", x[:, :8], np.asarray(weights, np.float32))
    assert np.abs(few - unrounded).max() > 1e-3


def test_a_table_of_bfloat16_is_looked_up_row_by_row():
    """A loop over tokens converts the rows that it looks up, not the table before it."""
    tokens = jnp.zeros((1, 1), jnp.int32)
    table = draw(np.random.default_rng(0), 640, 48).astype(jnp.bfloat16)

    def follow(table, tokens):
        def step(tokens, _):
            row = embedding_lookup(table, tokens, "float32", False)
            return (tokens + 1) % 640, row

        with trace_for_target(Target.parse("cpu:1")):
            return jax.lax.scan(step, tokens, length=3)[1]

    compiled = jax.jit(follow).lower(table, tokens).compile(KEEP_OPTIMIZATION_BARRIERS)
    np.testing.assert_array_equal(
        compiled(table, tokens)[:, 0, 0], np.asarray(table[:3], np.float32)
    )
    assert "= f32[640,48]{1,0} fusion" not in compiled.as_text()
