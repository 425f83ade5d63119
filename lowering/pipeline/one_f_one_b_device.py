"""Work of one device in 1F1B: the forward and backward passes of its chunks, and the exchanges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lowering.pipeline.microbatch_queue import exchange_with_queue
from lowering.pipeline.part_gradients import add_gradients
from lowering.pipeline.recorded import TickOrder
from lowering.pipeline.ring import Ring, read_slot, replace_slot, zero_unless
from lowering.pipeline.schedule import PartWeights, Pipeline, StageResult, mesh_axes_size
from lowering.pipeline.sharded_loss import sharded_loss
from lowering.pipeline.stored_inputs import StoredInputs
from lowering.tracing.control_flow import compute_in_turn
from lowering.tracing.recording import Recorded, call_recording
from lowering.trees import Tree
from sharding_rules.pipeline import pass_of, slot_of


class Carry(NamedTuple):
    """Arrays that a tick leaves to the next one."""

    x: jax.Array  # from the previous stage
    returned: tuple[jax.Array, ...]  # gradients from the next stage, of the last ticks in order
    queue: jax.Array
    stored: StoredInputs
    gradients: Tree  # accumulated


class ChunkPass(NamedTuple):
    """A pass of a chunk of this stage."""

    is_real: jax.Array  # false in the bubble
    microbatch: jax.Array
    turn: jax.Array  # round of the chunk


@dataclass(frozen=True)
class DeviceWork:
    """Passes of one device, and the weights and inputs that they need."""

    pipeline: Pipeline
    order: TickOrder
    copies: tuple[str, ...]  # mesh axes along which devices hold the same weights
    # PartWeights of this stage, and all of `last`
    parameters: dict[str, PartWeights]
    shards: Tree  # positions for which this stage computes the loss, of all microbatches
    of_all: Tree  # arrays that stages read, of all microbatches

    @property
    def ring(self) -> Ring:
        return self.order.ring

    @property
    def rounds(self) -> int:
        return self.order.virtual_stages

    def forward(self, tick: jax.Array, carry: Carry) -> tuple[Carry, jax.Array, Any]:
        """Run the forward pass of a chunk; return its y, and its scalars and recorded values."""
        slot = tick - self.ring.index
        this = self._pass(slot)
        (y, *scalars), recorded = self.pipeline.recorded(
            self._stage, {}, self._rows(self.parameters["stages"], this), carry.x, this
        )
        stored = carry.stored.store(self.ring, slot, carry.x)
        carry = carry._replace(x=self.ring.send_forward(y), stored=stored)
        return carry, y, (zero_unless(this.is_real, tuple(scalars)), recorded)

    def score(self, tick: jax.Array, y: jax.Array, sums: Tree) -> tuple[jax.Array, Tree, Any]:
        """Compute the loss of the last stage's y, if y is of the last chunk.

        Args:
            tick: The tick.
            y: Result of this tick's forward pass.
            sums: Gradients of `last`, accumulated.

        Returns:
            The gradient of y, the sums, and the loss with its metrics and recorded values.
        """
        microbatch, turn = pass_of(tick - (self.ring.size - 1), self.ring.size, self.rounds)
        shard = jax.tree.map(lambda array: read_slot(array, microbatch), self.shards)

        def compute(sums: Tree) -> tuple[jax.Array, Tree, Any]:
            weights = self.parameters["last"]
            score, sums, gradient, *recorded = sharded_loss(
                self.pipeline, self.ring, weights, sums, y, shard
            )
            return gradient, sums, (score, *recorded)

        if self.rounds == 1:
            return compute(sums)
        gradient, _, reports = jax.tree.map(jnp.zeros_like, jax.eval_shape(compute, sums))

        def skip(sums: Tree) -> tuple[jax.Array, Tree, Any]:
            return gradient, sums, reports

        taken = self.order.microbatches, self.order.phases.both
        return compute_in_turn(turn == self.rounds - 1, compute, skip, sums, taken)

    def backward(
        self, tick: jax.Array, carry: Carry, of_loss: jax.Array | None = None
    ) -> tuple[Carry, Recorded]:
        """Run the backward pass of a chunk; return gradients of recorded activations too.

        Args:
            tick: The tick.
            carry: Arrays of the previous tick, the gradients of `last` up to this one.
            of_loss: Gradient of the last chunk's y, in a tick that may compute the loss.
        """
        ring, stages = self.ring, self.parameters["stages"]
        this = self._pass(tick - self.order.phases.forward - (ring.size - 1) + ring.index)
        this = this._replace(turn=self.rounds - 1 - this.turn)
        x, stored = carry.stored.take(slot_of(this.microbatch, this.turn, ring.size, self.rounds))
        gradient = carry.returned[-1]
        if of_loss is not None:
            is_last_chunk = ring.is_last & (this.turn == self.rounds - 1)
            gradient = jnp.where(is_last_chunk, of_loss, gradient)

        rows = self._rows(stages, this)

        def differentiated(trained: Tree, x: jax.Array, slots: Recorded) -> Any:
            weights = rows._replace(trained=trained)
            (y, terms, metrics), _ = call_recording(
                self.pipeline.wanted and _nothing, slots, self._stage, weights, x, this
            )
            return (y, terms), metrics

        slots = self.pipeline.slots(self._stage, rows, x, this)
        sums = carry.gradients
        (_, terms), back, _ = add_gradients(
            differentiated,
            self.pipeline.in_place.get("stages", {}),
            rows.trained,
            self._rows(sums["stages"], this),
            x,
            slots,
            is_real=this.is_real,
        )
        share = 1 / mesh_axes_size(self.copies)
        weight = jax.tree.map(lambda term: jnp.full_like(term, share), terms)
        of_rows, of_x, recorded = back((gradient, weight))
        sums = {**sums, "stages": self._with_rows(sums["stages"], of_rows, this)}
        returned = (*carry.returned[1:], ring.send_back(of_x))
        return carry._replace(returned=returned, stored=stored, gradients=sums), recorded

    def exchange(self, tick: jax.Array | int, ticks: range, carry: Carry) -> Carry:
        """Exchange with the queue: the first stage takes a microbatch, the last puts a gradient.

        The gradient of a microbatch's input arrives at the last stage around the ring.

        Args:
            tick: The tick.
            ticks: All ticks of the loop that this one is in.
            carry: Arrays of the previous tick.
        """

        def pass_on(new: jax.Array) -> jax.Array:
            return jnp.where(self.ring.is_last, carry.returned[0], self.ring.send_back(new))

        x, queue = exchange_with_queue(
            self.ring, self.rounds, tick, ticks, carry.x, carry.queue, pass_on
        )
        return carry._replace(x=x, queue=queue)

    def _pass(self, slot: jax.Array) -> ChunkPass:
        """Return a pass of this stage by its number, in the order of execution."""
        count = self.order.microbatches * self.rounds
        microbatch, turn = pass_of(jnp.clip(slot, 0, count - 1), self.ring.size, self.rounds)
        return ChunkPass((slot >= 0) & (slot < count), microbatch, turn)

    def _stage(self, rows: PartWeights, x: jax.Array, this: ChunkPass) -> StageResult:
        chunk = this.turn * self.ring.size + self.ring.index
        return self.pipeline.run_stage(rows, x, this.microbatch, chunk, self.of_all)

    def _rows(self, stages: Tree, this: ChunkPass) -> Tree:
        """Return the rows of a chunk."""
        if self.rounds == 1:
            return stages
        return jax.tree.map(lambda array: read_slot(array, this.turn), stages)

    def _with_rows(self, stages: Tree, rows: Tree, this: ChunkPass) -> Tree:
        """Return the arrays of all chunks with the rows of one replaced."""
        if self.rounds == 1:
            return rows
        return jax.tree.map(lambda all, one: replace_slot(all, this.turn, one), stages, rows)


def _nothing(name: str) -> bool:
    return False
