import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from graphtrain.models.dot import dot
from lowering.constrain import placed
from lowering.target import Target
from lowering.tracing import tracing_for
from sharding_rules.rules import Rules

RULES = Rules.load(("data", "fsdp", "tensor"))
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


@pytest.mark.parametrize(
    ("target", "mesh", "dtype"),
    [
        ("h100:1", {"fsdp": 1}, "bfloat16"),
        ("h100:1", {"tensor": 2}, "float32"),  # parts of sums
        ("cpu:1", {"fsdp": 1}, "float32"),
        ("v5e:1x1", {"fsdp": 1}, "float32"),
    ],
)
def test_a_gpu_rounds_the_sums_it_has_whole(target, mesh, dtype):
    devices = np.array(jax.devices()[: math.prod(mesh.values())]).reshape(*mesh.values())
    arrays = jnp.ones((2, 8, 16), jnp.bfloat16), jnp.ones((16, 24), jnp.bfloat16)
    with tracing_for(Target.parse(target)), placed(Mesh(devices, tuple(mesh)), RULES):
        traced = jax.make_jaxpr(partial(dot, "bse,em->bsm"))(*arrays)
    assert f"preferred_element_type={dtype}" in str(traced)
