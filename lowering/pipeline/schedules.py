"""Pipeline: microbatches through stages that live on different devices, in one program.

It knows nothing of language models: it is given what comes before the stages, a stage, and what
comes after. The last two run inside one shard_map over the mesh axis of the stages and those along
which weights are only copied (data). Tensor, fsdp, expert and context stay automatic, so a model's
own constraints hold there. That form, and not a vmap over stages, because

- a stage is an ordinary call of the model: what it maps over an axis by hand (a ring of context)
  nests, and the shift to the next stage is one collective-permute that no compiler has to guess;
- gradients of weights are sums of one device until the loop ends, so data's all-reduce happens once
  a step. Left to the compiler it happens at every tick, in every layer. (fsdp, which is automatic,
  gathers weights and scatters gradients at every tick, as it does for microbatches in a row.)

Microbatches rest in blocks: of M, stage s embeds and scores numbers s M/S to (s + 1) M/S - 1, so no
work is repeated. A queue brings them to the first stage and takes results back: with every new
microbatch, one column of it moves by one stage around the ring. Numbers of ticks, and what happens
in each, are those of sharding_rules.pipeline.

What comes before the stages is left to the compiler: it is in no loop, and XLA's partitioner dies
of looking up a split table inside a shard_map over other axes (jax 0.11.2).

Without check_vma: a model would have to mark every constant that a loop carries. The gradient of an
input is then summed over the manual axes that its spec does not name, which is right for weights.
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

from lowering.pipeline.one_f_one_b import gradients_by_ticks
from lowering.pipeline.ring import Ring, only_if, read_column, replace_column
from lowering.tracing.constrain import by_hand, placement, split_of
from lowering.trees import Tree

Scalars = Any  # a tree of scalars


class Value(NamedTuple):
    """Sums over all microbatches."""

    objective: jax.Array  # what is minimised, with what the stages add to it
    reported: Scalars


@dataclass(frozen=True)
class Pipeline:
    """What is computed on each microbatch, which all have the same shapes.

    Parameters are a tree {"first", "stages", "last"}; arrays of "stages" begin with an axis of
    rows, as many for each stage, or with rounds and rows. Arrays of the microbatches begin with
    their number, a multiple of the stages, then sequences and positions.
    """

    first: Callable[[Tree, Tree, jax.Array], jax.Array]  # of parameters, microbatch and its number
    # Of a chunk's parameters, x, the numbers of microbatch and chunk: x, and terms of the objective
    # that are means over the sequences.
    stage: Callable[[Tree, jax.Array, jax.Array, jax.Array], tuple[jax.Array, Scalars]]
    # Of parameters, x and the microbatch, or some positions of both: objective, and what to report.
    last: Callable[[Tree, jax.Array, Tree], tuple[jax.Array, Scalars]]
    rounds: int = 1
    recompute: bool = True  # a stage in the backward pass, from its input; 1f1b always does
    joint: bool = False  # a stage mixes sequences, so data stays automatic

    def value(self, parameters: Tree, microbatches: Tree) -> Value:
        """Forward; its gradient is all of it backward, after all of it forward.

        With stages in rounds that is the circular schedule, in one round GPipe's.
        """
        ring, copies = self._axes()
        manual = (ring.axis, *copies)

        def device(parameters: Tree, queue: jax.Array, block: Tree) -> Value:
            with by_hand(manual):
                return _one_each(_forward(self, ring, _size(copies), parameters, queue, block))

        blocks = PartitionSpec(ring.axis, copies)
        specs = self._resting(ring), blocks, blocks
        each = _map(device, manual, specs, PartitionSpec(manual))
        queue = self._embed(ring, parameters["first"], microbatches)
        return jax.tree.map(jnp.sum, each(_in_loop(parameters), queue, microbatches))

    def value_and_gradients(self, parameters: Tree, microbatches: Tree) -> tuple[Value, Tree]:
        """One forward, one backward (1F1B): at every tick, each stage passes one microbatch on and
        another back. It keeps the inputs of 2 S - 1 microbatches, however many there are.

        `last` follows the last stage at once; every stage takes an S-th of the positions, which
        are a multiple of the stages.
        """
        ring, copies = self._axes()
        manual = (ring.axis, *copies)
        summed = {"stages": copies, "last": manual}

        def device(parameters: Tree, queue: jax.Array, pieces: Tree) -> Any:
            pieces = jax.tree.map(lambda piece: piece[..., 0], pieces)
            with by_hand(manual):
                value, gradients, queue = gradients_by_ticks(
                    self, ring, _size(copies), parameters, queue, pieces
                )
            totals = {part: lax.psum(gradients[part], axes) for part, axes in summed.items()}
            return _one_each(value), totals, queue

        resting, blocks = self._resting(ring), PartitionSpec(ring.axis, copies)
        specs = resting, blocks, PartitionSpec(None, copies, None, ring.axis)
        both = _map(device, manual, specs, (PartitionSpec(manual), resting, blocks))
        queue, embed_back = jax.vjp(
            lambda weights: self._embed(ring, weights, microbatches), parameters["first"]
        )
        # Piece s has positions s, s + S, ...: where tensor or context splits them, it stays so.
        pieces = jax.tree.map(lambda x: x.reshape(*x.shape[:2], -1, ring.size), microbatches)
        values, gradients, of_queue = both(_in_loop(parameters), queue, pieces)
        (gradients["first"],) = embed_back(of_queue)
        return jax.tree.map(jnp.sum, values), gradients

    def _embed(self, ring: Ring, weights: Tree, microbatches: Tree) -> jax.Array:
        """What enters the stages, in blocks: each stage computes as many as the others."""
        numbers = jnp.arange(len(jax.tree.leaves(microbatches)[0]))
        each = jax.vmap(self.first, in_axes=(None, 0, 0), spmd_axis_name=ring.axis)
        return each(weights, microbatches, numbers)

    def total(self, scores: tuple[jax.Array, Scalars], terms: Scalars, copies: int) -> Value:
        """The value, from the scores of microbatches and the stages' terms, tick by tick."""
        objective, reported = jax.tree.map(lambda each: each.sum(0), scores)
        return Value(objective + sum(map(jnp.sum, jax.tree.leaves(terms))) / copies, reported)

    def _axes(self) -> tuple[Ring, tuple[str, ...]]:
        """The mesh axis of stages, and those of sequences along which weights are only copied."""
        found = placement()
        assert found is not None, "a pipeline outside placed"
        (stage,) = split_of("stages")
        resting = {name for names in found.rules.parameters.values() for name in names}
        copies = tuple(name for name in split_of("batch") if name not in resting)
        return Ring(stage, found.shape.axes[stage]), () if self.joint else copies

    def _resting(self, ring: Ring) -> Tree:
        rows = PartitionSpec(ring.axis) if self.rounds == 1 else PartitionSpec(None, ring.axis)
        return {"stages": rows, "last": PartitionSpec()}


def _in_loop(parameters: Tree) -> Tree:
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


def _one_each(value: Value) -> Value:
    """Every device's scalars as an array, so that they are added up outside."""
    return jax.tree.map(lambda scalar: scalar[None], value)


def _forward(
    pipeline: Pipeline, ring: Ring, copies: int, parameters: Tree, queue: jax.Array, block: Tree
) -> Value:
    """What one device does: its chunks of all microbatches, and its block's score."""
    microbatches = len(queue) * ring.size
    work = _chunk_work(pipeline, ring)

    def tick(carry: tuple[jax.Array, jax.Array], tick: jax.Array) -> tuple[Any, Scalars]:
        x, queue = _take_turns(pipeline, ring, tick, *carry)
        slot = tick - ring.index
        real = (slot >= 0) & (slot < microbatches * pipeline.rounds)
        y, terms = work(parameters["stages"], x, jnp.maximum(slot, 0))
        return (ring.onward(y), queue), only_if(real, terms)

    ticks = microbatches * pipeline.rounds + ring.size - 1
    carry, terms = lax.scan(tick, (jnp.zeros_like(queue[0]), queue), jnp.arange(ticks))
    _, queue = _take_turns(pipeline, ring, jnp.int32(ticks), *carry)

    def score(item: tuple[jax.Array, Tree]) -> tuple[jax.Array, Scalars]:
        return pipeline.last(parameters["last"], *item)

    # Results left S turns after their microbatch came.
    scores = lax.map(jax.checkpoint(score), (jnp.roll(queue, -ring.size, axis=0), block))
    return pipeline.total(scores, terms, copies)


def _chunk_work(pipeline: Pipeline, ring: Ring) -> Callable:
    """A stage's work in a slot: a microbatch in a round, in the order of its ticks."""

    def work(rows: Tree, x: jax.Array, slot: jax.Array) -> tuple[jax.Array, Scalars]:
        group, within = jnp.divmod(slot, ring.size * pipeline.rounds)
        turn, position = jnp.divmod(within, ring.size)
        if pipeline.rounds > 1:
            rows = jax.tree.map(lambda array: read_column(array, turn), rows)
        number, chunk = group * ring.size + position, turn * ring.size + ring.index
        return pipeline.stage(rows, x, number, chunk)

    return jax.checkpoint(work, prevent_cse=False) if pipeline.recompute else work


def _take_turns(
    pipeline: Pipeline, ring: Ring, tick: jax.Array, x: jax.Array, queue: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """When a microbatch comes round finished, the first stage leaves it for a new one."""
    group, within = jnp.divmod(tick, ring.size * pipeline.rounds)
    column = (group * ring.size + within % ring.size) % len(queue)

    def exchange(x: jax.Array, queue: jax.Array) -> tuple[jax.Array, jax.Array]:
        new = read_column(queue, column)
        moved = ring.back(jnp.where(ring.is_first, x, new))
        return jnp.where(ring.is_first, new, x), replace_column(queue, column, moved)

    if pipeline.rounds == 1:
        return exchange(x, queue)
    return lax.cond(within < ring.size, exchange, lambda x, queue: (x, queue), x, queue)
