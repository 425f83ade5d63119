"""Totals of the gradients of a pipeline's stages over the copies of the weights.

A device adds up the gradients of its microbatches alone. Their sums over the copies (the mesh axis
data, and context with ring attention) are computed once a step: in interleaved 1F1B those of all
rounds but the first beside the last backward passes, a few layer rows in each. A pass neither reads
nor writes these rows, so that the compiler can overlap it with their collectives.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
from jax import lax
from jax.flatten_util import ravel_pytree

from lowering.pipeline.recorded import TickOrder
from lowering.tracing.constrain import placement
from lowering.tracing.current_target import traced_target
from lowering.tracing.gradient_scopes import AFTER_TICKS, BESIDE_TICK
from lowering.trees import Tree
from sharding_rules.pipeline import CoolDownSums, cool_down_sums


@dataclass(frozen=True)
class GradientTotals:
    """Totals of the gradients of one device's stages.

    The rows of all rounds are numbered together; the last ones are complete first.
    """

    copies: tuple[str, ...]  # mesh axes along which devices have the same weights
    rows: int  # of all rounds
    beside: CoolDownSums  # rows that ticks sum
    ticks: range  # of the loop in which they do

    @classmethod
    def of(cls, order: TickOrder, copies: tuple[str, ...], gradients: Tree) -> GradientTotals:
        """Return the totals of 1F1B.

        Args:
            order: The schedule.
            copies: Mesh axes along which devices have the same weights.
            gradients: Arrays (rounds, rows, ...), all of the same rows, or with one round (rows,
                ...); may be none.
        """
        arrays, rounds, end = jax.tree.leaves(gradients), order.virtual_stages, sum(order.phases)
        if not copies or not arrays or rounds == 1:
            return cls(copies, 0, CoolDownSums(0, 0), range(end, end))
        rows = arrays[0].shape[1]
        beside = cool_down_sums(order.ring.size, rounds, rows)
        return cls(copies, rounds * rows, beside, range(end - beside.ticks, end))

    def of_tick(self, gradients: Tree, tick: jax.Array) -> tuple[Tree, jax.Array]:
        """Return the totals of the rows of a tick, and the number of the first of these rows."""
        count = self.beside.rows_per_tick
        first = self.rows - (tick - self.ticks.start + 1) * count
        with jax.named_scope(BESIDE_TICK):
            rows = jax.tree.map(
                lambda array: lax.dynamic_slice_in_dim(_in_rows(array), first, count), gradients
            )
            return _sum(rows, self.copies), first

    def after_ticks(self, gradients: Tree) -> Tree:
        """Return the gradients with the totals of the rows that no tick has summed."""
        if not self.copies:
            return gradients
        with jax.named_scope(AFTER_TICKS):
            if not self.ticks:
                return lax.psum(gradients, self.copies)
            count = self.rows - self.beside.rows
            rows = jax.tree.map(lambda array: _in_rows(array)[:count], gradients)
            return with_rows(gradients, lax.psum(rows, self.copies), 0)


def _sum(rows: Tree, copies: tuple[str, ...]) -> Tree:
    """Return the sums of arrays over mesh axes; on GPUs by one collective where that is possible.

    XLA combines collectives up to 30 MB, and of several in a tick it would overlap one alone with
    the loop over layers: it has one in flight at a time (jax 0.10). Arrays that an automatic mesh
    axis shards cannot be joined without moving them.
    """
    target, current = traced_target(), placement()
    if target is None or current is None or target.platform != "cuda":
        return lax.psum(rows, copies)
    automatic = (name for name in current.shape.axes if name not in current.manual)
    if current.shape.size(tuple(automatic)) > 1:
        return lax.psum(rows, copies)
    joined, split = ravel_pytree(rows)
    return split(lax.psum(joined, copies))


def with_rows(gradients: Tree, rows: Tree, first: jax.Array | int) -> Tree:
    """Return gradients (rounds, rows, ...) with some of the rows of all rounds replaced."""

    def replaced(array: jax.Array, rows: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(_in_rows(array), rows, first, 0).reshape(array.shape)

    return jax.tree.map(replaced, gradients, rows)


def _in_rows(array: jax.Array) -> jax.Array:
    """Return an array (rounds, rows, ...) as (rounds x rows, ...)."""
    return array.reshape(-1, *array.shape[2:])
