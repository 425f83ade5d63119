"""Inputs of chunks that 1F1B stores on a stage until their backward pass."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from lowering.pipeline.ring import Ring, read_slot, replace_slot
from sharding_rules.pipeline import stored_stage_inputs


class StoredInputs(NamedTuple):
    """Inputs in columns; a forward pass takes the column that the last backward pass has read.

    A stage computes as many passes before its first backward pass as it later has inputs to store.
    Passes are numbered by their slot: `sharding_rules.pipeline.slot_of`.
    """

    inputs: jax.Array  # (columns, ...)
    columns: jax.Array  # column of each of the latest forward passes, by slot modulo their number
    free: jax.Array  # column that was read last

    @classmethod
    def empty(cls, ring: Ring, virtual_stages: int, x: jax.Array) -> StoredInputs:
        """Return room for the inputs of a schedule, each of the shape of x."""
        count = stored_stage_inputs("1f1b", ring.size, virtual_stages, 0)
        latest = 2 * ring.size * virtual_stages - 1  # the longest that an input waits, in passes
        inputs = jnp.zeros((count, *x.shape), x.dtype)
        return cls(inputs, jnp.zeros(latest, jnp.int32), jnp.int32(0))

    def store(self, ring: Ring, slot: jax.Array, x: jax.Array) -> StoredInputs:
        """Store the input of a forward pass; in the bubble, where nothing is read later."""
        slot = jnp.maximum(slot, 0)
        used = len(self.inputs) - 2 * ring.index  # later stages have fewer inputs at once
        column = jnp.where(slot < used, slot, self.free)
        return self._replace(
            inputs=replace_slot(self.inputs, column, x),
            columns=replace_slot(self.columns, slot % len(self.columns), column),
        )

    def take(self, slot: jax.Array) -> tuple[jax.Array, StoredInputs]:
        """Return the input of a forward pass, and leave its column to the next one."""
        column = read_slot(self.columns, slot % len(self.columns))
        return read_slot(self.inputs, column), self._replace(free=column)
