"""Gradients that a scan over layers writes in place: those of the scan as JAX differentiates it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowering.tracing.recording import record, recording, scan_layers
from lowering.tracing.summed_gradient import GradientStack, SummedGradient
from sharding_rules.arrays import ArraySpec

SPEC = ArraySpec((3, 4, 4), ("layers", "embed", "mlp"))
WEIGHTS, SUMS = jax.random.normal(jax.random.key(0), (2, *SPEC.shape))
SCALES, X = jnp.array([1.0, 2.0, 3.0]), jax.random.normal(jax.random.key(1), (2, 4))


def objective(weights, scales=SCALES, **scan):
    def layer(x, layer):
        weights, scale = layer
        x = record("output", jnp.tanh(x @ weights) * scale, "batch", "embed")
        return x, x.sum()

    x, sums = scan_layers(layer, X, (weights, scales), **scan)
    return (x**2).sum() + sums.sum()


def stack(has_sums):
    return GradientStack(SPEC, "optimizer", has_sums)


@pytest.mark.parametrize(
    "scan", [{}, {"unroll": 3}, {"transform": jax.checkpoint}], ids=["plain", "unrolled", "remat"]
)
def test_the_gradient_of_layers_is_added_to_earlier_sums(scan):
    summed = jax.grad(
        lambda sums: objective(SummedGradient(WEIGHTS, sums, None, stack(True)), **scan)
    )
    np.testing.assert_allclose(summed(SUMS), SUMS + jax.grad(objective)(WEIGHTS), rtol=1e-5)


@pytest.mark.parametrize("is_real", [True, False])
def test_a_pass_in_the_bubble_adds_nothing(is_real):
    def of_sums(sums):
        return objective(SummedGradient(WEIGHTS, sums, jnp.array(is_real), stack(True)))

    expected = SUMS + is_real * jax.grad(objective)(WEIGHTS)
    np.testing.assert_allclose(jax.grad(of_sums)(SUMS), expected, rtol=1e-5)


def test_the_first_gradient_replaces_whatever_was_there():
    first = jax.grad(lambda sums: objective(SummedGradient(WEIGHTS, sums, None, stack(False))))
    np.testing.assert_allclose(first(SUMS), jax.grad(objective)(WEIGHTS), rtol=1e-5)


def test_arrays_beside_them_have_their_own_gradient():
    of_both = jax.grad(
        lambda sums, scales: objective(SummedGradient(WEIGHTS, sums, None, stack(True)), scales),
        argnums=(0, 1),
    )
    _, of_scales = of_both(SUMS, SCALES)
    expected = jax.grad(lambda scales: objective(WEIGHTS, scales))(SCALES)
    np.testing.assert_allclose(of_scales, expected, rtol=1e-5)


def test_activations_are_recorded_as_without_sums():
    with recording(lambda name: True) as plain:
        objective(WEIGHTS)
    with recording(lambda name: True) as summed:
        objective(SummedGradient(WEIGHTS, SUMS, None, stack(True)))
    np.testing.assert_array_equal(summed.values["layers/output"], plain.values["layers/output"])


def test_no_second_stack_of_gradients_is_allocated():
    """A step of accumulation holds the weights, the sums, and what a layer needs."""
    spec = ArraySpec((64, 64, 64), ("layers", "embed", "mlp"))
    stacked = GradientStack(spec, "optimizer", True)
    shape = jax.ShapeDtypeStruct(spec.shape, jnp.float32)

    def add(weights, sums):
        def loss(sums):
            layers = SummedGradient(weights, sums, None, stacked)
            x, _ = scan_layers(lambda x, w: (jnp.tanh(x @ w), None), jnp.ones((8, 64)), layers)
            return x.sum()

        return jax.grad(loss)(sums)

    compiled = jax.jit(add, donate_argnums=1).lower(shape, shape).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * 64**3 / 2
