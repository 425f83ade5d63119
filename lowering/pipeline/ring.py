"""Ring: collectives between neighbouring devices of one mesh axis, inside a shard_map over it."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from lowering.trees import Tree


@dataclass(frozen=True)
class Ring:
    """A mesh axis as a ring: the last device is followed by the first."""

    axis: str
    size: int

    @property
    def index(self) -> jax.Array:
        """Index of this device along the mesh axis."""
        return lax.axis_index(self.axis)

    @property
    def is_first(self) -> jax.Array:
        return self.index == 0

    @property
    def is_last(self) -> jax.Array:
        return self.index == self.size - 1

    def send_forward(self, x: jax.Array) -> jax.Array:
        """Send x to the next device; return the x of the previous one."""
        return self._shift(x, 1)

    def send_back(self, x: jax.Array) -> jax.Array:
        """Send x to the previous device; return the x of the next one."""
        return self._shift(x, -1)

    def spread(self, x: jax.Array, axis: int) -> jax.Array:
        """Scatter the last device's x over the ring: device i receives index i of `axis`.

        Args:
            x: array whose dimension `axis` has the size of the ring.
            axis: dimension to scatter; absent from the result.
        """
        received = lax.all_to_all(x, self.axis, split_axis=axis, concat_axis=axis, tiled=True)
        return lax.index_in_dim(received, self.size - 1, axis, keepdims=False)

    def collect(self, piece: jax.Array, axis: int) -> jax.Array:
        """Gather the shards of all devices along a new dimension `axis`; the inverse of spread."""
        return lax.all_gather(piece, self.axis, axis=axis)

    def _shift(self, x: jax.Array, step: int) -> jax.Array:
        pairs = [(device, (device + step) % self.size) for device in range(self.size)]
        return lax.ppermute(x, self.axis, pairs)


def read_slot(queue: jax.Array, column: jax.Array) -> jax.Array:
    """Return one array of a queue, which is a stack of arrays along dimension 0."""
    return lax.dynamic_index_in_dim(queue, column, 0, keepdims=False)


def replace_slot(queue: jax.Array, column: jax.Array, x: jax.Array) -> jax.Array:
    """Return the queue with one of its arrays replaced by x."""
    return lax.dynamic_update_index_in_dim(queue, x, column, 0)


def zero_unless(real: jax.Array, tree: Tree) -> Tree:
    """Return the tree if `real`, else zeros of the same shapes."""
    return jax.tree.map(lambda x: jnp.where(real, x, jnp.zeros_like(x)), tree)
