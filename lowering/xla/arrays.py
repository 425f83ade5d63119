"""Arrays on devices, from arrays of this process or from shards that are read one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from lowering.trees import Tree, flatten, unflatten
from lowering.xla import distributed


def to_devices(tree: Tree, described: Tree) -> Tree:
    """Copy host arrays to the devices, with the shardings of an executable's inputs().

    With several processes, each copies the shards of its own devices.
    """
    if distributed.count() == 1:
        return jax.device_put(tree, jax.tree.map(lambda array: array.sharding, described))

    def placed(array: Any, like: jax.ShapeDtypeStruct) -> jax.Array:
        host_array = np.asarray(array, like.dtype)
        return jax.make_array_from_callback(
            host_array.shape, like.sharding, lambda index: host_array[index]
        )

    return jax.tree.map(placed, tree, described)


def from_shards(
    described: Tree, read: Callable[[str, tuple[int, ...], tuple[slice, ...]], np.ndarray]
) -> Tree:
    """Create arrays on the devices; read each device's shard separately.

    Args:
        described: Shapes, dtypes and shardings.
        read: Function of a path, the unsharded shape and an index into it; returns that shard.
    """

    def make(path: str, like: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.make_array_from_callback(
            like.shape,
            like.sharding,
            lambda index: read(path, like.shape, index or ()).astype(like.dtype, copy=False),
        )

    return unflatten({path: make(path, like) for path, like in flatten(described).items()})


def checkpoint_arrays(tree: Tree) -> Tree:
    """Return the tree as arrays that a checkpoint can write: JAX arrays, unchanged."""
    return tree
