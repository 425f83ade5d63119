import re
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from graphtrain.models.matmul import dot, dot_many
from lowering.machine.target import Target
from lowering.tracing.current_target import trace_for_target

EQUATIONS = {
    "bse,em->bsm": ((4, 64, 16), (16, 24)),
    "bse,ehd->bshd": ((2, 8, 16), (16, 4, 6)),
    "bshd,hde->bse": ((2, 8, 4, 6), (4, 6, 16)),
    "bse,ve->bsv": ((2, 8, 16), (24, 16)),
    "bqhgd,bkhd->bhqgk": ((2, 8, 2, 3, 4), (2, 8, 2, 4)),
    "bhqgk,bkhd->bqhgd": ((2, 2, 8, 3, 8), (2, 8, 2, 4)),
}


@partial(jax.jit, static_argnums=0)
def with_gradients(product, a, b, cotangent):
    y, gradients = jax.vjp(product, a, b)
    return y, *gradients(cotangent.astype(y.dtype))


def inputs(equation: str, dtype: str) -> list[jax.Array]:
    """Two operands and a cotangent."""
    shapes = EQUATIONS[equation]
    result = jax.eval_shape(lambda a, b: jnp.einsum(equation, a, b), *map(jnp.zeros, shapes))
    random = np.random.default_rng(0)
    return [jnp.asarray(random.normal(size=s), dtype) for s in (*shapes, result.shape)]


@pytest.mark.parametrize("equation", EQUATIONS)
def test_float32_product_and_gradients_equal_einsum(equation):
    arrays = inputs(equation, "float32")
    got = with_gradients(partial(dot, equation), *arrays)
    want = with_gradients(partial(jnp.einsum, equation, precision="highest"), *arrays)
    for mine, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("equation", EQUATIONS)
def test_bfloat16_rounds_only_operands_and_results(equation):
    arrays = inputs(equation, "bfloat16")
    got = with_gradients(partial(dot, equation), *arrays)
    exact = (array.astype("float32") for array in arrays)
    want = with_gradients(partial(jnp.einsum, equation, precision="highest"), *exact)
    for mine, theirs in zip(got, want, strict=True):
        assert mine.dtype == jnp.bfloat16
        np.testing.assert_allclose(mine.astype("float32"), theirs, rtol=2**-8, atol=1e-5)


def test_the_gradient_of_a_float32_weight_is_the_float32_sum_of_bfloat16_products():
    x, weight, cotangent = inputs("bse,em->bsm", "bfloat16")
    got = with_gradients(partial(dot, "bse,em->bsm"), x, weight.astype("float32"), cotangent)
    want = np.einsum("bse,bsm->em", *(np.asarray(z, np.float64) for z in (x, cotangent)))
    assert [array.dtype for array in got] == [jnp.bfloat16, jnp.bfloat16, jnp.float32]
    np.testing.assert_allclose(got[2], want, rtol=1e-5, atol=1e-5)


def test_sums_can_stay_unrounded():
    x, weight, _ = inputs("bse,em->bsm", "bfloat16")
    got = dot("bse,em->bsm", x, weight, jnp.float32)
    want = np.einsum("bse,em->bsm", *(np.asarray(z, np.float64) for z in (x, weight)))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("machine", ["h100", "v5e"])
def test_an_accelerator_is_asked_for_bfloat16_but_not_for_weights_gradients(machine):
    x, weight, cotangent = inputs("bse,em->bsm", "bfloat16")
    several = [weight.astype("float32"), weight.astype("float32")]

    def loss(x, several):
        return sum(jnp.sum(y * cotangent) for y in dot_many("bse,em->bsm", x, several))

    with trace_for_target(Target(machine, (8,))):
        program = str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(x, several))
        got = jax.grad(loss, argnums=(0, 1))(x, several)
    of_products = Counter(re.findall(r":(\w+)\[[\d,]+\] = dot_general", program))
    assert of_products == {"bf16": 4, "f32": 2}  # forward and to x; to each weight
    assert [got[0].dtype, got[1][0].dtype] == [jnp.bfloat16, jnp.float32]
    exact = (np.asarray(z, np.float64) for z in (cotangent, weight))
    want = 2 * np.einsum("bsm,em->bse", *exact)
    np.testing.assert_allclose(np.asarray(got[0], np.float64), want, rtol=2**-7, atol=1e-5)
