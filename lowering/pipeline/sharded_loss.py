"""Loss of 1F1B, of which each stage computes a share of the positions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from lowering.pipeline.part_gradients import add_gradients
from lowering.pipeline.ring import Ring
from lowering.pipeline.schedule import PartWeights, Pipeline
from lowering.tracing.recording import Recorded
from lowering.trees import Tree


def sharded_loss(
    pipeline: Pipeline,
    ring: Ring,
    weights: PartWeights,
    sums: Tree,
    y: jax.Array,
    shard: Tree,
) -> tuple[Any, Tree, jax.Array, Recorded, Recorded]:
    """Compute the loss on the last stage's output; each stage computes its shard of the positions.

    Returns:
        This stage's terms of the loss, the sums with this stage's terms of the weight gradient, the
        complete gradient of y, this stage's shard of the named activations, and the gradients with
        respect to them.
    """
    batch, length, *rest = y.shape
    y_shard = ring.spread(y.reshape(batch, length // ring.size, ring.size, *rest), 2)

    def objective(trained: Tree, y_shard: jax.Array, slots: Recorded) -> tuple[jax.Array, Any]:
        (score, reported), recorded = pipeline.recorded(
            pipeline.last, slots, weights._replace(trained=trained), y_shard, shard
        )
        return score, (reported, recorded)

    slots = pipeline.slots(pipeline.last, weights, y_shard, shard)
    score, back, (reported, recorded) = add_gradients(
        objective, pipeline.in_place.get("last", {}), weights.trained, sums, y_shard, slots
    )
    sums, y_shard_gradient, back_last = back(jnp.ones_like(score))
    gradient = ring.collect(y_shard_gradient, 2).reshape(y.shape)
    return (score, reported), sums, gradient, recorded, back_last
