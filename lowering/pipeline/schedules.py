"""Pipeline parallelism: microbatches through stages on different devices, in one program.

The module is independent of the model: the caller passes a function before the stages (embedding),
a stage, and a function after them (LM head and loss). The last two run inside one shard_map over
the mesh axis of the stages and those along which weights are only replicated (data). The tensor,
fsdp, expert and context axes stay automatic, so the model's own sharding constraints apply to them.
This form was chosen over a vmap over stages because

- a stage is an ordinary call of the model, so its own shard_map (ring attention over context) can
  be nested, and the shift to the next stage is exactly one collective-permute;
- weight gradients are accumulated on each device until the loop ends, so the all-reduce over data
  happens once a step. The compiler would otherwise insert it at every tick, in every layer. (The
  automatic fsdp axis gathers weights and scatters gradients at every tick, as it does for each
  microbatch of gradient accumulation.)

Of M microbatches, stage s of S stores a block, embeds it and computes its loss: indices s M/S to
(s + 1) M/S - 1, so no work is repeated. A queue moves microbatches to the first stage and results
back: with every new microbatch, one column of it moves by one stage around the ring.
sharding_rules.pipeline defines the number of ticks and the work in each.

The embedding is outside the shard_map: it is in no loop, and XLA's partitioner crashes on a lookup
in a sharded table inside a shard_map over other axes (jax 0.11.2).

check_vma is off: with it, a model would have to mark every constant that a loop carries. The
gradient of an input is then summed over the manual axes absent from its spec, as weights require.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from lowering.pipeline.one_f_one_b import one_f_one_b_gradients
from lowering.pipeline.ring import Ring, read_slot, replace_slot, zero_unless
from lowering.tracing.constrain import manual_axes, mesh_axes_of, placement
from lowering.trees import Tree

Scalars = Any  # a pytree of scalars


class PipelineLoss(NamedTuple):
    """Objective and metrics, summed over all microbatches."""

    objective: jax.Array  # loss to minimise, including the auxiliary terms of the stages
    metrics: Scalars


@dataclass(frozen=True)
class Pipeline:
    """Functions of a pipeline, applied to each microbatch; all microbatches have the same shapes.

    Parameters are a tree {"first", "stages", "last"}. Arrays of "stages" have a leading axis of
    layer rows, equally many for each stage, or with several rounds two leading axes (rounds, rows).
    Arrays of the microbatches have shape (microbatches, sequences, positions, ...); the number of
    microbatches is a multiple of the number of stages.
    """

    first: Callable[[Tree, Tree, jax.Array], jax.Array]  # (parameters, microbatch, its index) -> x
    # (parameters of a chunk, x, indices of microbatch and chunk) -> (x, auxiliary terms of the
    # objective, which are means over the sequences)
    stage: Callable[[Tree, jax.Array, jax.Array, jax.Array], tuple[jax.Array, Scalars]]
    # (parameters, x, microbatch), or some positions of the last two -> (objective, metrics)
    last: Callable[[Tree, jax.Array, Tree], tuple[jax.Array, Scalars]]
    virtual_stages: int = 1  # chunks of layers for each stage (virtual stages)
    remat: bool = True  # activation checkpointing of each stage; always on with 1f1b
    mixes_sequences: bool = (
        False  # a stage computes across sequences, so the data axis stays automatic
    )

    def value(self, parameters: Tree, microbatches: Tree) -> PipelineLoss:
        """Compute the forward pass; differentiation runs all of backward after all of forward.

        With several rounds this is the circular schedule, with one round GPipe.
        """
        ring, copies = self._axes()
        manual = (ring.axis, *copies)

        def device(parameters: Tree, queue: jax.Array, block: Tree) -> PipelineLoss:
            with manual_axes(manual):
                return _scalars_as_arrays(
                    _forward(self, ring, _size(copies), parameters, queue, block)
                )

        blocks = PartitionSpec(ring.axis, copies)
        specs = self._parameter_specs(ring), blocks, blocks
        each = _map(device, manual, specs, PartitionSpec(manual))
        queue = self._embed(ring, parameters["first"], microbatches)
        return jax.tree.map(jnp.sum, each(_loop_parameters(parameters), queue, microbatches))

    def value_and_gradients(
        self, parameters: Tree, microbatches: Tree
    ) -> tuple[PipelineLoss, Tree]:
        """Compute value and gradients with the 1F1B schedule.

        At every tick each of the S stages runs one microbatch forward and another one backward. It
        stores the inputs of 2 S - 1 microbatches, independent of their number.

        `last` runs directly after the last stage; every stage computes 1/S of the positions, whose
        number must be a multiple of S.
        """
        ring, copies = self._axes()
        manual = (ring.axis, *copies)
        summed = {"stages": copies, "last": manual}

        def device(parameters: Tree, queue: jax.Array, pieces: Tree) -> Any:
            pieces = jax.tree.map(lambda piece: piece[..., 0], pieces)
            with manual_axes(manual):
                value, gradients, queue = one_f_one_b_gradients(
                    self, ring, _size(copies), parameters, queue, pieces
                )
            totals = {part: lax.psum(gradients[part], axes) for part, axes in summed.items()}
            return _scalars_as_arrays(value), totals, queue

        resting, blocks = self._parameter_specs(ring), PartitionSpec(ring.axis, copies)
        specs = resting, blocks, PartitionSpec(None, copies, None, ring.axis)
        both = _map(device, manual, specs, (PartitionSpec(manual), resting, blocks))
        queue, embed_back = jax.vjp(
            lambda weights: self._embed(ring, weights, microbatches), parameters["first"]
        )
        # Piece s contains positions s, s + S, ..., which keeps a split over tensor or context.
        pieces = jax.tree.map(lambda x: x.reshape(*x.shape[:2], -1, ring.size), microbatches)
        values, gradients, of_queue = both(_loop_parameters(parameters), queue, pieces)
        (gradients["first"],) = embed_back(of_queue)
        return jax.tree.map(jnp.sum, values), gradients

    def _embed(self, ring: Ring, weights: Tree, microbatches: Tree) -> jax.Array:
        """Return the embedded microbatches in blocks; each stage computes equally many."""
        numbers = jnp.arange(len(jax.tree.leaves(microbatches)[0]))
        each = jax.vmap(self.first, in_axes=(None, 0, 0), spmd_axis_name=ring.axis)
        return each(weights, microbatches, numbers)

    def total(self, scores: tuple[jax.Array, Scalars], terms: Scalars, copies: int) -> PipelineLoss:
        """Sum the losses of the microbatches and the stages' auxiliary terms of all ticks."""
        objective, reported = jax.tree.map(lambda each: each.sum(0), scores)
        return PipelineLoss(
            objective + sum(map(jnp.sum, jax.tree.leaves(terms))) / copies, reported
        )

    def _axes(self) -> tuple[Ring, tuple[str, ...]]:
        """Return the mesh axis of the stages, and the batch axes that replicate weights."""
        found = placement()
        assert found is not None, "a pipeline outside placed"
        (stage,) = mesh_axes_of("stages")
        resting = {name for names in found.rules.parameters.values() for name in names}
        copies = tuple(name for name in mesh_axes_of("batch") if name not in resting)
        return Ring(stage, found.shape.axes[stage]), () if self.mixes_sequences else copies

    def _parameter_specs(self, ring: Ring) -> Tree:
        rows = (
            PartitionSpec(ring.axis) if self.virtual_stages == 1 else PartitionSpec(None, ring.axis)
        )
        return {"stages": rows, "last": PartitionSpec()}


def _loop_parameters(parameters: Tree) -> Tree:
    return {part: parameters[part] for part in ("stages", "last")}


def _map(body: Callable, manual: tuple[str, ...], inputs: Any, outputs: Any) -> Callable:
    found = placement()
    assert found is not None
    return jax.shard_map(
        body,
        mesh=found.current_mesh,
        in_specs=inputs,
        out_specs=outputs,
        axis_names=set(manual),
        check_vma=False,
    )


def _size(axes: tuple[str, ...]) -> int:
    found = placement()
    assert found is not None
    return math.prod(found.shape.axes[name] for name in axes)


def _scalars_as_arrays(value: PipelineLoss) -> PipelineLoss:
    """Return each device's scalars as arrays of size 1, to be summed outside the shard_map."""
    return jax.tree.map(lambda scalar: scalar[None], value)


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
        y, terms = work(parameters["stages"], x, jnp.maximum(slot, 0))
        return (ring.send_forward(y), queue), zero_unless(real, terms)

    ticks = microbatches * pipeline.virtual_stages + ring.size - 1
    carry, terms = lax.scan(tick, (jnp.zeros_like(queue[0]), queue), jnp.arange(ticks))
    _, queue = _exchange_with_queue(pipeline, ring, jnp.int32(ticks), *carry)

    def score(item: tuple[jax.Array, Tree]) -> tuple[jax.Array, Scalars]:
        return pipeline.last(parameters["last"], *item)

    # The result of a microbatch is put into the queue S exchanges after the microbatch left it.
    scores = lax.map(jax.checkpoint(score), (jnp.roll(queue, -ring.size, axis=0), block))
    return pipeline.total(scores, terms, copies)


def _chunk_work(pipeline: Pipeline, ring: Ring) -> Callable:
    """Return a stage's work in a slot: one microbatch in one round, in tick order."""

    def work(rows: Tree, x: jax.Array, slot: jax.Array) -> tuple[jax.Array, Scalars]:
        group, within = jnp.divmod(slot, ring.size * pipeline.virtual_stages)
        turn, position = jnp.divmod(within, ring.size)
        if pipeline.virtual_stages > 1:
            rows = jax.tree.map(lambda array: read_slot(array, turn), rows)
        number, chunk = group * ring.size + position, turn * ring.size + ring.index
        return pipeline.stage(rows, x, number, chunk)

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
