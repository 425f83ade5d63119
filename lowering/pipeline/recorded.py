"""Named activations of a pipeline's parts: from ticks of stages to microbatches and chunks.

Each tick of each stage returns those of the microbatch that it computes, or of none. All begin with
the dimensions (batch, seq), in a stage after one of its layer rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from lowering.pipeline.ring import Ring
from lowering.tracing.recording import Recorded
from sharding_rules.pipeline import Phases, WeightCopies, one_f_one_b_phases, slot_of

Ticks = Callable[[np.ndarray, np.ndarray], np.ndarray]  # of microbatches and their chunks


@dataclass(frozen=True)
class Wanted:
    """Named activations that a pipeline returns."""

    values: Callable[[str], bool] = lambda name: False
    gradients: Collection[str] = ()  # names of those whose gradients are returned


class RecordedParts(NamedTuple):
    """Named activations of the parts of a pipeline, or gradients with respect to them.

    Arrays of `first` and `last` have a leading dimension of microbatches, those of `stages` the
    dimensions (microbatches, chunks, rows).
    """

    first: Recorded
    stages: Recorded
    last: Recorded


NOTHING_RECORDED = RecordedParts({}, {}, {})


@dataclass(frozen=True)
class TickOrder:
    """Passes of a stage, by which a schedule computes each microbatch.

    Each stage has `ticks` passes in a direction: one for each microbatch and round, and those of
    the bubble.
    """

    ring: Ring
    microbatches: int
    virtual_stages: int = 1

    @property
    def ticks(self) -> int:
        return self.microbatches * self.virtual_stages + self.ring.size - 1

    @property
    def phases(self) -> Phases:
        """Lengths of the phases of 1F1B."""
        return one_f_one_b_phases(self.ring.size, self.virtual_stages, self.microbatches)

    def forward(self, microbatch: np.ndarray, chunk: np.ndarray) -> np.ndarray:
        """Return the forward pass of a chunk, as `schedules` and `one_f_one_b` compute it."""
        turn, stage = np.divmod(chunk, self.ring.size)
        return slot_of(microbatch, turn, self.ring.size, self.virtual_stages) + stage

    def backward(self, microbatch: np.ndarray, chunk: np.ndarray) -> np.ndarray:
        """Return the backward pass of a chunk in 1F1B: chunks are in the reverse order."""
        return self.forward(microbatch, self.ring.size * self.virtual_stages - 1 - chunk)

    def scored(self) -> np.ndarray:
        """Return the passes, of the phase of both in 1F1B, in which microbatches are scored."""
        last_chunk = np.array(self.ring.size * self.virtual_stages - 1)
        return self.forward(np.arange(self.microbatches), last_chunk) - self.phases.forward

    def to_microbatches(self, arrays: Recorded, tick_of: Ticks) -> Recorded:
        """Reorder arrays (stages x ticks, ...) to (microbatches, chunks, ...)."""
        places = self._places(tick_of)
        return {name: array[places] for name, array in arrays.items()}

    def to_ticks(self, arrays: Recorded, tick_of: Ticks) -> Recorded:
        """Reorder arrays (microbatches, chunks, ...) to (stages x ticks, ...), zero elsewhere."""
        places = self._places(tick_of)
        count = self.ring.size * self.ticks
        return {
            name: jnp.zeros((count, *array.shape[2:]), array.dtype).at[places].set(array)
            for name, array in arrays.items()
        }

    def _places(self, tick_of: Ticks) -> np.ndarray:
        """Return the index among stages x ticks for each microbatch and chunk."""
        chunks = np.arange(self.ring.size * self.virtual_stages)
        microbatch, chunk = np.meshgrid(np.arange(self.microbatches), chunks, indexing="ij")
        return chunk % self.ring.size * self.ticks + tick_of(microbatch, chunk)


def stage_spec(ring: Ring, copies: WeightCopies) -> PartitionSpec:
    """Return how the arrays of stages are split: (stages x ticks, rows, batch, seq, ...)."""
    return PartitionSpec(ring.axis, None, *copies)


def last_spec(ring: Ring, copies: WeightCopies) -> PartitionSpec:
    """Return how those of `last` are split: (microbatches or stages x ticks, batch, seq, ...)."""
    return PartitionSpec(ring.axis, *copies)


def join_positions(arrays: Recorded, order: TickOrder) -> Recorded:
    """Join the positions of which each stage of 1F1B computes every S-th.

    Args:
        arrays: (stages x passes of the phase of both, batch, seq / stages, ...).
        order: the schedule.

    Returns:
        Arrays (microbatches, batch, seq, ...).
    """

    def join(array: jax.Array) -> jax.Array:
        array = array.reshape(order.ring.size, order.phases.both, *array.shape[1:])
        array = jnp.moveaxis(array[:, order.scored()], 0, 3)  # microbatches, batch, seq / S, S
        return array.reshape(*array.shape[:2], -1, *array.shape[4:])

    return {name: join(array) for name, array in arrays.items()}
