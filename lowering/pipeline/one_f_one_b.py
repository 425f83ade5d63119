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

from lowering.pipeline.recorded import (
    RecordedParts,
    TickOrder,
    join_positions,
    last_spec,
    stage_spec,
)
from lowering.pipeline.ring import Ring, read_slot, replace_slot, zero_unless
from lowering.pipeline.schedule import (
    Pipeline,
    PipelineLoss,
    StageResult,
    loop_parameters,
    map_stages,
    mesh_axes_size,
    scalars_as_arrays,
)
from lowering.tracing.constrain import manual_axes
from lowering.tracing.recording import Recorded, call_recording, zero_slots
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
    return recorded_one_f_one_b(pipeline, parameters, microbatches)[:2]


def recorded_one_f_one_b(
    pipeline: Pipeline, parameters: Tree, microbatches: Tree
) -> tuple[PipelineLoss, Tree, RecordedParts, RecordedParts]:
    """Compute as `one_f_one_b_gradients`; return the activations and gradients that are wanted too.

    Returns:
        Objective and metrics, gradients of the parameters, activations, and the gradients of the
        objective with respect to activations.
    """
    axes = pipeline.axes("1f1b", microbatches)
    ring, copies, manual = axes.ring, axes.copies, axes.all
    summed = {"stages": copies.all, "last": manual}
    count = len(jax.tree.leaves(microbatches)[0])
    order = TickOrder(ring, count + 2 * (ring.size - 1), count)

    def device(parameters: Tree, queue: jax.Array, shards: Tree) -> Any:
        shards = jax.tree.map(lambda shard: shard[..., 0], shards)
        with manual_axes(manual):
            value, gradients, queue, recorded = _device_gradients(
                pipeline, order, mesh_axes_size(copies.all), parameters, queue, shards
            )
        totals = {group: lax.psum(gradients[group], axes) for group, axes in summed.items()}
        return scalars_as_arrays(value), totals, queue, recorded

    parameter_specs = pipeline.parameter_specs(ring)
    queue_spec = PartitionSpec(ring.axis, *copies)
    specs = parameter_specs, queue_spec, PartitionSpec(None, *copies, ring.axis)
    of_device = stage_spec(ring, copies), last_spec(ring, copies)
    outputs = PartitionSpec(manual), parameter_specs, queue_spec, (of_device, of_device)
    forward_backward = map_stages(device, manual, specs, outputs)
    queue, embed_back, of_first = jax.vjp(
        lambda weights, slots: pipeline.embed(ring, weights, microbatches, slots),
        parameters["first"],
        _slots_of_first(pipeline, parameters["first"], microbatches),
        has_aux=True,
    )
    # Shard s contains positions s, s + S, ..., which keeps a split over tensor or context.
    shards = jax.tree.map(lambda x: x.reshape(*x.shape[:2], -1, ring.size), microbatches)
    values, gradients, queue_gradient, (forward, backward) = forward_backward(
        loop_parameters(parameters), queue, shards
    )
    gradients["first"], back_first = embed_back(queue_gradient)
    recorded, back = (
        RecordedParts(
            of_first,
            order.to_microbatches(of_stages, tick_of),
            join_positions(of_last, order),
        )
        for of_first, (of_stages, of_last), tick_of in (
            (of_first, forward, order.forward),
            (back_first, backward, order.backward),
        )
    )
    return jax.tree.map(jnp.sum, values), gradients, recorded, back


def _slots_of_first(pipeline: Pipeline, weights: Tree, microbatches: Tree) -> Recorded:
    """Return zeros for the activations of `first` whose gradients are wanted."""
    if pipeline.wanted is None:
        return {}
    count, one = len(jax.tree.leaves(microbatches)[0]), jax.tree.map(lambda x: x[0], microbatches)
    names = pipeline.wanted.gradients
    zeros = zero_slots(names, pipeline.first, weights, one, jnp.int32(0))
    return {name: jnp.broadcast_to(x, (count, *x.shape)) for name, x in zeros.items()}


def _device_gradients(
    pipeline: Pipeline,
    order: TickOrder,
    copies: int,
    parameters: Tree,
    queue: jax.Array,
    shards: Tree,
) -> tuple[PipelineLoss, Tree, jax.Array, Any]:
    """Return this device's terms of the value and the gradients, and the gradient of its queue.

    Also the named activations of stages and `last`, and the gradients with respect to them, of all
    ticks.

    Args:
        pipeline: The functions to compute.
        order: The schedule.
        copies: Number of devices that hold the same weights.
        parameters: Weights of this stage, and all weights of `last`.
        queue: Embedded inputs of the microbatches that are stored on this stage, (M / S, ...).
        shards: Positions for which this stage computes the loss, of all microbatches.
    """
    ring, x = order.ring, jnp.zeros_like(queue[0])
    stored_inputs = jnp.zeros((2 * ring.size - 1, *x.shape), x.dtype)
    zeros = jax.tree.map(jnp.zeros_like, parameters)

    tick = _tick(pipeline, ring, copies, parameters, shards, order.microbatches)
    carry, (scores, of_stages, recorded) = lax.scan(
        tick, (x, x, queue, stored_inputs, zeros), jnp.arange(order.ticks)
    )
    x, returned, queue, _, gradients = carry
    _, queue = _exchange_with_queue(ring, jnp.int32(order.ticks), x, returned, queue)
    # The gradient of a microbatch is put into the queue 2 S - 1 ticks after the microbatch left it.
    queue_gradient = jnp.roll(queue, 1 - 2 * ring.size, axis=0)
    return pipeline.total(scores, of_stages, copies), gradients, queue_gradient, recorded


def _tick(
    pipeline: Pipeline, ring: Ring, copies: int, parameters: Tree, shards: Tree, microbatches: int
) -> Callable[[Any, jax.Array], tuple[Any, Any]]:
    """Return the loop body: the forward of one microbatch, the loss of one, the backward of one.

    The carry contains the activations from the previous stage, the gradient from the next stage,
    the queue, the stage inputs stored for the backward pass, and the accumulated gradients. The
    outputs are the losses, terms and metrics of each tick, and what is recorded.
    """

    def stage(rows: Tree, x: jax.Array, microbatch: jax.Array) -> StageResult:
        index = jnp.clip(microbatch, 0, microbatches - 1)
        return pipeline.stage(rows, x, index, ring.index)

    def differentiated(rows: Tree, x: jax.Array, slots: Recorded, microbatch: jax.Array) -> Any:
        (y, terms, metrics), _ = call_recording(
            pipeline.wanted and _nothing, slots, stage, rows, x, microbatch
        )
        return (y, terms), metrics

    def only_real(microbatch: jax.Array, tree: Tree) -> Tree:
        return zero_unless((microbatch >= 0) & (microbatch < microbatches), tree)

    def tick(carry: Any, tick: jax.Array) -> tuple[Any, Any]:
        x, returned, queue, stored_inputs, gradients = carry
        x, queue = _exchange_with_queue(ring, tick, x, returned, queue)
        forward, scored = tick - ring.index, tick - (ring.size - 1)
        backward = tick - 2 * (ring.size - 1) + ring.index

        (y, terms, metrics), recorded = pipeline.recorded(
            stage, {}, parameters["stages"], x, forward
        )
        stored_inputs = replace_slot(stored_inputs, forward % len(stored_inputs), x)
        shard = jax.tree.map(lambda array: read_slot(array, scored % microbatches), shards)
        scores, of_last, gradient, recorded_last, back_last = _sharded_loss(
            pipeline, ring, parameters["last"], y, shard
        )

        stored_input = read_slot(stored_inputs, backward % len(stored_inputs))
        inputs = parameters["stages"], stored_input
        _, back, _ = jax.vjp(
            lambda rows, x, slots: differentiated(rows, x, slots, backward),
            *inputs,
            _slots(pipeline, stage, *inputs, backward),
            has_aux=True,
        )
        weight = jax.tree.map(lambda term: jnp.full_like(term, 1 / copies), terms)
        of_rows, gradient, back_stage = back((jnp.where(ring.is_last, gradient, returned), weight))

        shares = {"stages": only_real(backward, of_rows), "last": only_real(scored, of_last)}
        gradients = jax.tree.map(jnp.add, gradients, shares)
        both = (recorded, recorded_last), (back_stage, back_last)
        reports = only_real(scored, scores), only_real(forward, (terms, metrics)), both
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


def _nothing(name: str) -> bool:
    return False


def _slots(pipeline: Pipeline, part: Callable[..., Any], *inputs: Any) -> Recorded:
    """Return zeros for the activations of a part whose gradients are wanted."""
    return {} if pipeline.wanted is None else zero_slots(pipeline.wanted.gradients, part, *inputs)


def _sharded_loss(
    pipeline: Pipeline, ring: Ring, weights: Tree, y: jax.Array, shard: Tree
) -> tuple[Any, Tree, jax.Array, Recorded, Recorded]:
    """Compute the loss on the last stage's output; each stage computes its shard of the positions.

    Returns:
        This stage's terms of the loss and of the weight gradient, the complete gradient of y, this
        stage's shard of the named activations, and the gradients with respect to them.
    """
    batch, length, *rest = y.shape
    y_shard = ring.spread(y.reshape(batch, length // ring.size, ring.size, *rest), 2)

    def objective(weights: Tree, y_shard: jax.Array, slots: Recorded) -> tuple[jax.Array, Any]:
        (score, reported), recorded = pipeline.recorded(
            pipeline.last, slots, weights, y_shard, shard
        )
        return score, (reported, recorded)

    slots = _slots(pipeline, pipeline.last, weights, y_shard, shard)
    score, back, (reported, recorded) = jax.vjp(objective, weights, y_shard, slots, has_aux=True)
    of_weights, y_shard_gradient, back_last = back(jnp.ones_like(score))
    gradient = ring.collect(y_shard_gradient, 2).reshape(y.shape)
    return (score, reported), of_weights, gradient, recorded, back_last
