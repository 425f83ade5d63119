"""Weights of int8: their rounding, and their products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from graphtrain.models.int8_weight import Int8Weight, quantize_int8
from graphtrain.models.matmul import dot, dot_many, few_rows
from lowering.machine.target import Target
from lowering.tracing.current_target import trace_for_target

# Equation, shape of x after its rows, shape of the weights, and their summed axes.
PRODUCTS = [
    ("bse,ehd->bshd", (24,), (24, 3, 8), (0,)),
    ("bshd,hde->bse", (3, 8), (3, 8, 24), (0, 1)),
    ("bse,ev->bsv", (24,), (24, 40), (0,)),
]


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def test_each_output_has_a_scale_and_uses_all_levels():
    weights = draw(24, 3, 8) * draw(3, 8)
    weights[:, 1, 1] = 0
    codes, scales = quantize_int8(jnp.asarray(weights), (0,))
    assert codes.dtype == jnp.int8 and scales.shape == (3, 8)
    largest = np.abs(np.asarray(codes, int)).max(0)
    assert largest[1, 1] == 0 and (np.delete(largest.ravel(), 9) == 127).all()
    error = np.abs(np.asarray(codes) * np.asarray(scales) - weights)
    assert (error <= np.asarray(scales) * 0.501).all()


@pytest.mark.parametrize(("equation", "of_x", "shape", "summed"), PRODUCTS)
def test_a_product_is_that_of_the_rounded_weights(equation, of_x, shape, summed):
    x, weight = draw(2, 5, *of_x), Int8Weight(*quantize_int8(jnp.asarray(draw(*shape)), summed))
    wanted = np.einsum(equation, x.astype(np.float64), rounded(weight, summed))
    for found in (
        dot(equation, jnp.asarray(x), weight),
        *dot_many(equation, jnp.asarray(x), [weight]),
    ):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    half = dot(equation, jnp.asarray(x, jnp.bfloat16), weight)
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(half, np.float32), wanted, rtol=0.05, atol=0.1)


@pytest.mark.parametrize("rows", [(1, 1), (8, 1), (1, 5)])
@pytest.mark.parametrize(("equation", "of_x", "shape", "summed"), PRODUCTS)
def test_a_cpu_multiplies_integers(equation, of_x, shape, summed, rows):
    x, weight = draw(*rows, *of_x), Int8Weight(*quantize_int8(jnp.asarray(draw(*shape)), summed))

    @jax.jit
    def product(x, weight):
        with few_rows(), trace_for_target(Target.parse("cpu:1")):
            return dot(equation, x, weight)

    scales = np.abs(x).reshape(*rows, -1).max(-1).reshape(*rows, *[1] * len(of_x)) / 127
    rounded_x = np.rint(x / scales).astype(np.float64) * scales
    wanted = np.einsum(equation, rounded_x, rounded(weight, summed))
    np.testing.assert_allclose(product(x, weight), wanted, rtol=1e-5, atol=1e-5)
    assert "s32[" in str(product.lower(x, weight).compile().as_text())


def rounded(weight: Int8Weight, summed: tuple[int, ...]) -> np.ndarray:
    scales = np.expand_dims(np.asarray(weight.scales, np.float64), summed)
    return np.asarray(weight.codes, np.float64) * scales
