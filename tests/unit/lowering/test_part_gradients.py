"""Gradients that a part of a pipeline adds to those of earlier passes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowering.pipeline.block_scores import score_block
from lowering.pipeline.part_gradients import add_gradients
from lowering.pipeline.schedule import PartWeights, Pipeline

WEIGHTS = {"scale": jnp.array([1.0, 2.0, 3.0])}
X = jnp.arange(6.0).reshape(2, 3) - 2  # two microbatches
TARGETS = jnp.array([3.0, -1.0])


def loss(weights, x, target):
    return (jnp.dot(weights["scale"], x) - target) ** 2


def assert_trees_close(one, other):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), one, other)


@pytest.mark.parametrize(("is_real", "factor"), [(None, 1.0), (True, 1.0), (False, 0.0)])
def test_gradients_are_added_to_earlier_ones_except_in_the_bubble(is_real, factor):
    def part(trained, x):
        return loss(trained, x, TARGETS[0]), "metrics"

    sums = {"scale": jnp.full(3, 10.0)}
    value, back, metrics = add_gradients(
        part, {}, WEIGHTS, sums, X[0], is_real=None if is_real is None else jnp.array(is_real)
    )
    added, of_x = back(jnp.ones(()))
    of_weights, expected = jax.grad(loss, (0, 1))(WEIGHTS, X[0], TARGETS[0])
    assert (value, metrics) == (loss(WEIGHTS, X[0], TARGETS[0]), "metrics")
    assert_trees_close(added, {"scale": 10 + factor * of_weights["scale"]})
    assert_trees_close(of_x, expected)


@pytest.mark.parametrize("has_beside", [False, True])
def test_losses_of_a_block_have_the_gradients_of_their_sum(has_beside):
    def last(weights, x, microbatch):
        value = loss({"scale": weights.trained["scale"] + weights.frozen}, x, microbatch["target"])
        return value, {"loss": 2 * value}

    unused = None if not has_beside else lambda weights, microbatch: {}
    pipeline = Pipeline(lambda *_: X, lambda *_: (X, 0, 0), last, beside=unused)

    def summed(trained, results, targets):
        weights, block = PartWeights(trained, jnp.float32(0.5)), {"target": targets}
        (objective,), metrics = score_block(pipeline, weights, results, block)
        return 3 * objective, metrics["loss"]

    def expected(trained, results, targets):
        moved = {"scale": trained["scale"] + 0.5}
        return 3 * sum(map(lambda x, y: loss(moved, x, y), results, targets))

    given = WEIGHTS, X, TARGETS
    (value, metric), gradients = jax.value_and_grad(summed, (0, 1, 2), has_aux=True)(*given)
    of_weights, of_results, of_targets = jax.grad(expected, (0, 1, 2))(*given)
    assert_trees_close(value, expected(*given))
    assert_trees_close(metric, jnp.full(1, 2 * value / 3))
    if not has_beside:  # no other array of a microbatch depends on weights
        of_targets = jnp.zeros(2)
    assert_trees_close(gradients, (of_weights, of_results, of_targets))
