"""Ring: the devices along one mesh axis, each with a next one, inside a shard_map over it."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from lowering.trees import Tree


@dataclass(frozen=True)
class Ring:
    """A mesh axis whose last device is followed by its first."""

    axis: str
    size: int

    @property
    def index(self) -> jax.Array:
        """Which device this is."""
        return lax.axis_index(self.axis)

    @property
    def is_first(self) -> jax.Array:
        return self.index == 0

    @property
    def is_last(self) -> jax.Array:
        return self.index == self.size - 1

    def onward(self, x: jax.Array) -> jax.Array:
        """Send x to the next device; return what comes from the one before."""
        return self._shift(x, 1)

    def back(self, x: jax.Array) -> jax.Array:
        """Send x to the device before; return what comes from the next."""
        return self._shift(x, -1)

    def spread(self, x: jax.Array, axis: int) -> jax.Array:
        """Piece by piece along an array axis of their number, the last device's x to all."""
        pieces = lax.all_to_all(x, self.axis, split_axis=axis, concat_axis=axis, tiled=True)
        return lax.index_in_dim(pieces, self.size - 1, axis, keepdims=False)

    def collect(self, piece: jax.Array, axis: int) -> jax.Array:
        """What spread was given, from the pieces of all devices."""
        return lax.all_gather(piece, self.axis, axis=axis)

    def _shift(self, x: jax.Array, step: int) -> jax.Array:
        pairs = [(device, (device + step) % self.size) for device in range(self.size)]
        return lax.ppermute(x, self.axis, pairs)


def read_column(queue: jax.Array, column: jax.Array) -> jax.Array:
    """One array of a queue, which is a stack of them."""
    return lax.dynamic_index_in_dim(queue, column, 0, keepdims=False)


def replace_column(queue: jax.Array, column: jax.Array, x: jax.Array) -> jax.Array:
    """The queue with x in the place of one of its arrays."""
    return lax.dynamic_update_index_in_dim(queue, x, column, 0)


def only_if(real: jax.Array, tree: Tree) -> Tree:
    """A tree, or zeros in its place."""
    return jax.tree.map(lambda x: jnp.where(real, x, jnp.zeros_like(x)), tree)
