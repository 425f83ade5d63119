"""1F1B pipeline schedule: each stage runs forward and backward at every tick.

Source: Narayanan et al. 2021, section 2.2, https://arxiv.org/abs/2104.04473
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from lowering.pipeline.ring import Ring, read_slot, replace_slot, zero_unless
from lowering.pipeline.schedule import (
    Pipeline,
    PipelineLoss,
    loop_parameters,
    map_stages,
    mesh_axes_size,
    scalars_as_arrays,
)
from lowering.tracing.constrain import manual_axes
from lowering.trees import Tree


def one_f_one_b_gradients(
    pipeline: Pipeline, parameters: Tree, microbatches: Tree
) -> tuple[PipelineLoss, Tree]:
    """Compute the objective, the metrics and the gradients with the 1F1B schedule.

    At every tick each of the S stages runs one microbatch forward and another one backward. It
    stores the inputs of 2 S - 1 microbatches, independent of their number.

    `last` runs directly after the last stage; every stage computes 1/S of the positions, whose
    number must be a multiple of S.
    """
    axes = pipeline.axes("1f1b", microbatches)
    ring, copies, manual = axes.ring, axes.copies, axes.all
    summed = {"stages": copies.all, "last": manual}

    def device(parameters: Tree, queue: jax.Array, shards: Tree) -> Any:
        shards = jax.tree.map(lambda shard: shard[..., 0], shards)
        with manual_axes(manual):
            value, gradients, queue = _device_gradients(
                pipeline, ring, mesh_axes_size(copies.all), parameters, queue, shards
            )
        totals = {group: lax.psum(gradients[group], axes) for group, axes in summed.items()}
        return scalars_as_arrays(value), totals, queue

    parameter_specs = pipeline.parameter_specs(ring)
    queue_spec = PartitionSpec(ring.axis, *copies)
    specs = parameter_specs, queue_spec, PartitionSpec(None, *copies, ring.axis)
    forward_backward = map_stages(
        device, manual, specs, (PartitionSpec(manual), parameter_specs, queue_spec)
    )
    queue, embed_back = jax.vjp(
        lambda weights: pipeline.embed(ring, weights, microbatches), parameters["first"]
    )
    # Shard s contains positions s, s + S, ..., which keeps a split over tensor or context.
    shards = jax.tree.map(lambda x: x.reshape(*x.shape[:2], -1, ring.size), microbatches)
    values, gradients, queue_gradient = forward_backward(loop_parameters(parameters), queue, shards)
    (gradients["first"],) = embed_back(queue_gradient)
    return jax.tree.map(jnp.sum, values), gradients


def _device_gradients(
    pipeline: Pipeline, ring: Ring, copies: int, parameters: Tree, queue: jax.Array, shards: Tree
) -> tuple[PipelineLoss, Tree, jax.Array]:
    """Return this device's terms of the value and the gradients, and the gradient of its queue.

    Args:
        pipeline: The functions to compute.
        ring: The mesh axis of the stages.
        copies: Number of devices that hold the same weights.
        parameters: Weights of this stage, and all weights of `last`.
        queue: Embedded inputs of the microbatches that are stored on this stage, (M / S, ...).
        shards: Positions for which this stage computes the loss, of all microbatches.
    """
    x = jnp.zeros_like(queue[0])
    stored_inputs = jnp.zeros((2 * ring.size - 1, *x.shape), x.dtype)
    zeros = jax.tree.map(jnp.zeros_like, parameters)
    microbatches = len(queue) * ring.size
    ticks = microbatches + 2 * (ring.size - 1)

    tick = _tick(pipeline, ring, copies, parameters, shards, microbatches)
    carry, (scores, of_stages) = lax.scan(
        tick, (x, x, queue, stored_inputs, zeros), jnp.arange(ticks)
    )
    x, returned, queue, _, gradients = carry
    _, queue = _exchange_with_queue(ring, jnp.int32(ticks), x, returned, queue)
    # The gradient of a microbatch is put into the queue 2 S - 1 ticks after the microbatch left it.
    queue_gradient = jnp.roll(queue, 1 - 2 * ring.size, axis=0)
    return pipeline.total(scores, of_stages, copies), gradients, queue_gradient


def _tick(
    pipeline: Pipeline, ring: Ring, copies: int, parameters: Tree, shards: Tree, microbatches: int
) -> Callable[[Any, jax.Array], tuple[Any, Any]]:
    """Return the loop body: the forward of one microbatch, the loss of one, the backward of one.

    The carry contains the activations from the previous stage, the gradient from the next stage,
    the queue, the stage inputs stored for the backward pass, and the accumulated gradients. The
    outputs are the losses, terms and metrics of each tick.
    """

    def work(rows: Tree, x: jax.Array, microbatch: jax.Array) -> tuple[tuple[jax.Array, Any], Any]:
        index = jnp.clip(microbatch, 0, microbatches - 1)
        y, terms, metrics = pipeline.stage(rows, x, index, ring.index)
        return (y, terms), metrics

    def only_real(microbatch: jax.Array, tree: Tree) -> Tree:
        return zero_unless((microbatch >= 0) & (microbatch < microbatches), tree)

    def tick(carry: Any, tick: jax.Array) -> tuple[Any, Any]:
        x, returned, queue, stored_inputs, gradients = carry
        x, queue = _exchange_with_queue(ring, tick, x, returned, queue)
        forward, scored = tick - ring.index, tick - (ring.size - 1)
        backward = tick - 2 * (ring.size - 1) + ring.index

        (y, terms), metrics = work(parameters["stages"], x, forward)
        stored_inputs = replace_slot(stored_inputs, forward % len(stored_inputs), x)
        shard = jax.tree.map(lambda array: read_slot(array, scored % microbatches), shards)
        scores, of_last, gradient = _sharded_loss(pipeline, ring, parameters["last"], y, shard)

        stored_input = read_slot(stored_inputs, backward % len(stored_inputs))
        _, back, _ = jax.vjp(
            lambda rows, x: work(rows, x, backward),
            parameters["stages"],
            stored_input,
            has_aux=True,
        )
        weight = jax.tree.map(lambda term: jnp.full_like(term, 1 / copies), terms)
        of_rows, gradient = back((jnp.where(ring.is_last, gradient, returned), weight))

        shares = {"stages": only_real(backward, of_rows), "last": only_real(scored, of_last)}
        gradients = jax.tree.map(jnp.add, gradients, shares)
        reports = only_real(scored, scores), only_real(forward, (terms, metrics))
        return (
            ring.send_forward(y),
            ring.send_back(gradient),
            queue,
            stored_inputs,
            gradients,
        ), reports

    return tick


def _exchange_with_queue(
    ring: Ring, tick: jax.Array, x: jax.Array, returned: jax.Array, queue: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Exchange with the queue: the first stage reads a microbatch, the last one writes a gradient.

    The gradient of a microbatch's input arrives at the last stage around the ring.
    """
    column = tick % len(queue)
    new = read_slot(queue, column)
    moved = jnp.where(ring.is_last, returned, ring.send_back(new))
    return jnp.where(ring.is_first, new, x), replace_slot(queue, column, moved)


def _sharded_loss(
    pipeline: Pipeline, ring: Ring, weights: Tree, y: jax.Array, shard: Tree
) -> tuple[Any, Tree, jax.Array]:
    """Compute the loss on the last stage's output; each stage computes its shard of the positions.

    Returns:
        This stage's terms of the loss and of the weight gradient, and the complete gradient of y.
    """
    batch, length, *rest = y.shape
    y_shard = ring.spread(y.reshape(batch, length // ring.size, ring.size, *rest), 2)

    def objective(weights: Tree, y_shard: jax.Array) -> tuple[jax.Array, Any]:
        return pipeline.last(weights, y_shard, shard)

    score, back, reported = jax.vjp(objective, weights, y_shard, has_aux=True)
    of_weights, y_shard_gradient = back(jnp.ones_like(score))
    return (score, reported), of_weights, ring.collect(y_shard_gradient, 2).reshape(y.shape)
