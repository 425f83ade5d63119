"""Pipeline schedules of which JAX computes the gradient: GPipe and circular."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from lowering.pipeline.block_scores import score_block
from lowering.pipeline.microbatch_queue import exchange_with_queue
from lowering.pipeline.recorded import (
    NOTHING_RECORDED,
    RecordedParts,
    TickOrder,
    last_spec,
    stage_spec,
)
from lowering.pipeline.ring import Ring, read_slot, zero_unless
from lowering.pipeline.schedule import (
    Pipeline,
    PipelineLoss,
    Scalars,
    loop_parameters,
    map_stages,
    mesh_axes_size,
    scalars_as_arrays,
)
from lowering.tracing.constrain import manual_axes
from lowering.tracing.recording import Recorded
from lowering.trees import Tree
from sharding_rules.pipeline import pass_of


def pipeline_loss(pipeline: Pipeline, parameters: Tree, microbatches: Tree) -> PipelineLoss:
    """Compute the forward pass; differentiation runs all of backward after all of forward.

    With several rounds this is the circular schedule, with one round GPipe.
    """
    return recorded_pipeline_loss(pipeline, parameters, microbatches)[0]


def recorded_pipeline_loss(
    pipeline: Pipeline,
    parameters: Tree,
    microbatches: Tree,
    slots: RecordedParts = NOTHING_RECORDED,
) -> tuple[PipelineLoss, RecordedParts]:
    """Compute as `pipeline_loss`; return the activations that are wanted too.

    Args:
        pipeline: the functions to compute.
        parameters: weights of all parts.
        microbatches: inputs.
        slots: zeros in the shape of activations, with respect to which the caller differentiates.
    """
    axes = pipeline.axes("circular", microbatches)
    ring, copies, manual = axes.ring, axes.copies, axes.all
    count = len(jax.tree.leaves(microbatches)[0])
    order = TickOrder(ring, count, pipeline.virtual_stages)

    def device(
        parameters: Tree, queue: jax.Array, block: Tree, of_all: Tree, slots: _OfDevice
    ) -> Any:
        with manual_axes(manual):
            work = _chunk_work(pipeline, ring, of_all)
            loss, recorded = _forward(
                pipeline, order, mesh_axes_size(copies.all), work, parameters, queue, block, slots
            )
        return scalars_as_arrays(loss), recorded

    blocks = PartitionSpec(ring.axis, *copies)
    of_device = stage_spec(ring, copies), last_spec(ring, copies)
    read = PartitionSpec(None, copies.batch)
    specs = pipeline.parameter_specs(ring), blocks, blocks, read, of_device
    each = map_stages(device, manual, specs, (PartitionSpec(manual), of_device))
    queue, of_first = pipeline.embed(ring, parameters["first"], microbatches, slots.first)
    microbatches = pipeline.with_arrays_beside(ring, parameters["first"], microbatches)
    slots_of_device = order.to_ticks(slots.stages, order.forward), slots.last
    losses, (of_stages, of_last) = each(
        loop_parameters(parameters), queue, *pipeline.divide(microbatches), slots_of_device
    )
    of_stages = order.to_microbatches(of_stages, order.forward)
    return jax.tree.map(jnp.sum, losses), RecordedParts(of_first, of_stages, of_last)


_OfDevice = tuple[Recorded, Recorded]  # activations of the stages and of `last`, or their slots


def _forward(
    pipeline: Pipeline,
    order: TickOrder,
    copies: int,
    work: Callable,
    parameters: Tree,
    queue: jax.Array,
    block: Tree,
    slots: _OfDevice,
) -> tuple[PipelineLoss, _OfDevice]:
    """Run one device's forward pass: its chunks of all microbatches, and the loss of its block."""
    ring, microbatches = order.ring, order.microbatches
    rounds = pipeline.virtual_stages

    def exchange(tick: jax.Array, ticks: range, x: jax.Array, queue: jax.Array) -> tuple[Any, Any]:
        def pass_on(new: jax.Array) -> jax.Array:
            return ring.send_back(jnp.where(ring.is_first, x, new))  # the first stage's x is final

        return exchange_with_queue(ring, rounds, tick, ticks, x, queue, pass_on)

    def tick(carry: tuple[jax.Array, jax.Array], inputs: Any) -> tuple[Any, Any]:
        tick, slots = inputs
        x, queue = exchange(tick, range(order.ticks), *carry)
        slot = tick - ring.index
        real = (slot >= 0) & (slot < microbatches * rounds)
        (y, *of_stage), recorded = work(parameters["stages"], x, jnp.maximum(slot, 0), slots)
        return (ring.send_forward(y), queue), (zero_unless(real, tuple(of_stage)), recorded)

    carry, (of_stages, recorded) = lax.scan(
        tick, (jnp.zeros_like(queue[0]), queue), (jnp.arange(order.ticks), slots[0])
    )
    after = order.ticks
    _, queue = exchange(jnp.int32(after), range(after, after + 1), *carry)

    # The result of a microbatch is put into the queue S exchanges after the microbatch left it.
    results = jnp.roll(queue, -ring.size, axis=0)
    if pipeline.wanted is None:
        scores = score_block(pipeline, parameters["last"], results, block)
        return pipeline.total(scores, of_stages, copies), (recorded, {})

    def score(item: tuple[jax.Array, Tree, Recorded]) -> tuple[tuple[jax.Array, Scalars], Recorded]:
        x, microbatch, slots = item
        return pipeline.recorded(pipeline.last, slots, parameters["last"], x, microbatch)

    scores, recorded_last = lax.map(jax.checkpoint(score), (results, block, slots[1]))
    return pipeline.total(scores, of_stages, copies), (recorded, recorded_last)


def _chunk_work(pipeline: Pipeline, ring: Ring, of_all: Tree) -> Callable:
    """Return a stage's work in a slot: one microbatch in one round, in tick order.

    Args:
        pipeline: The functions to compute.
        ring: The stages.
        of_all: Arrays of all microbatches that stages read.
    """

    def work(rows: Tree, x: jax.Array, slot: jax.Array, slots: Recorded) -> tuple[Any, Recorded]:
        microbatch, turn = pass_of(slot, ring.size, pipeline.virtual_stages)
        if pipeline.virtual_stages > 1:
            rows = jax.tree.map(lambda array: read_slot(array, turn), rows)
        chunk = turn * ring.size + ring.index
        return pipeline.recorded(pipeline.run_stage, slots, rows, x, microbatch, chunk, of_all)

    return jax.checkpoint(work, prevent_cse=False) if pipeline.remat else work
