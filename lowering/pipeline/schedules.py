"""Pipeline schedules of which JAX computes the gradient: GPipe and circular."""

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
    Scalars,
    StageResult,
    loop_parameters,
    map_stages,
    mesh_axes_size,
    scalars_as_arrays,
)
from lowering.tracing.constrain import manual_axes
from lowering.trees import Tree


def pipeline_loss(pipeline: Pipeline, parameters: Tree, microbatches: Tree) -> PipelineLoss:
    """Compute the forward pass; differentiation runs all of backward after all of forward.

    With several rounds this is the circular schedule, with one round GPipe.
    """
    axes = pipeline.axes("circular", microbatches)
    ring, copies, manual = axes.ring, axes.copies, axes.all

    def device(parameters: Tree, queue: jax.Array, block: Tree) -> PipelineLoss:
        with manual_axes(manual):
            return scalars_as_arrays(
                _forward(pipeline, ring, mesh_axes_size(copies.all), parameters, queue, block)
            )

    blocks = PartitionSpec(ring.axis, *copies)
    specs = pipeline.parameter_specs(ring), blocks, blocks
    each = map_stages(device, manual, specs, PartitionSpec(manual))
    queue = pipeline.embed(ring, parameters["first"], microbatches)
    return jax.tree.map(jnp.sum, each(loop_parameters(parameters), queue, microbatches))


def _forward(
    pipeline: Pipeline, ring: Ring, copies: int, parameters: Tree, queue: jax.Array, block: Tree
) -> PipelineLoss:
    """Run one device's forward pass: its chunks of all microbatches, and the loss of its block."""
    microbatches = len(queue) * ring.size
    work = _chunk_work(pipeline, ring)

    def tick(carry: tuple[jax.Array, jax.Array], tick: jax.Array) -> tuple[Any, Scalars]:
        x, queue = _exchange_with_queue(pipeline, ring, tick, *carry)
        slot = tick - ring.index
        real = (slot >= 0) & (slot < microbatches * pipeline.virtual_stages)
        y, *of_stage = work(parameters["stages"], x, jnp.maximum(slot, 0))
        return (ring.send_forward(y), queue), zero_unless(real, tuple(of_stage))

    ticks = microbatches * pipeline.virtual_stages + ring.size - 1
    carry, of_stages = lax.scan(tick, (jnp.zeros_like(queue[0]), queue), jnp.arange(ticks))
    _, queue = _exchange_with_queue(pipeline, ring, jnp.int32(ticks), *carry)

    def score(item: tuple[jax.Array, Tree]) -> tuple[jax.Array, Scalars]:
        return pipeline.last(parameters["last"], *item)

    # The result of a microbatch is put into the queue S exchanges after the microbatch left it.
    scores = lax.map(jax.checkpoint(score), (jnp.roll(queue, -ring.size, axis=0), block))
    return pipeline.total(scores, of_stages, copies)


def _chunk_work(pipeline: Pipeline, ring: Ring) -> Callable:
    """Return a stage's work in a slot: one microbatch in one round, in tick order."""

    def work(rows: Tree, x: jax.Array, slot: jax.Array) -> StageResult:
        group, within = jnp.divmod(slot, ring.size * pipeline.virtual_stages)
        turn, position = jnp.divmod(within, ring.size)
        if pipeline.virtual_stages > 1:
            rows = jax.tree.map(lambda array: read_slot(array, turn), rows)
        microbatch, chunk = group * ring.size + position, turn * ring.size + ring.index
        return pipeline.stage(rows, x, microbatch, chunk)

    return jax.checkpoint(work, prevent_cse=False) if pipeline.remat else work


def _exchange_with_queue(
    pipeline: Pipeline, ring: Ring, tick: jax.Array, x: jax.Array, queue: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Exchange a finished microbatch at the first stage for a new one from the queue."""
    group, within = jnp.divmod(tick, ring.size * pipeline.virtual_stages)
    column = (group * ring.size + within % ring.size) % len(queue)

    def exchange(x: jax.Array, queue: jax.Array) -> tuple[jax.Array, jax.Array]:
        new = read_slot(queue, column)
        moved = ring.send_back(jnp.where(ring.is_first, x, new))
        return jnp.where(ring.is_first, new, x), replace_slot(queue, column, moved)

    if pipeline.virtual_stages == 1:
        return exchange(x, queue)
    return lax.cond(within < ring.size, exchange, lambda x, queue: (x, queue), x, queue)
