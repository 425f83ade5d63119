"""Whole matrices of parameters that rest in shards: each device takes some, and gives them back.

Matrices of one shape lie in a stack. An all-to-all exchanges shards of all of them for some whole
ones (`graphtrain.models.matrices`), which only this device computes with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from graphtrain.models.matrices import MatrixAxes, MatrixGroup, Move, group_matrices
from lowering.tracing.constrain import placement
from lowering.trees import flatten
from sharding_rules.arrays import ArraySpec
from sharding_rules.mesh import MeshShape
from sharding_rules.plan import make_layout


def divide(
    tree: Any, matrices: Mapping[str, ArraySpec]
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Return the matrices and the other arrays of a tree, by path."""
    arrays = flatten(tree)
    others = {path: array for path, array in arrays.items() if path not in matrices}
    return {path: arrays[path] for path in matrices}, others


def average(momentum: jax.Array, gradient: jax.Array, decay: float) -> jax.Array:
    """Return the exponential moving average of gradients, in their dtype."""
    return decay * momentum.astype(gradient.dtype) + (1 - decay) * gradient


def groups_of(specs: Mapping[str, ArraySpec]) -> list[MatrixGroup]:
    """Return the groups of matrices on the mesh for which the caller is traced."""
    current = placement()
    if current is None:
        return group_matrices(specs, None, MeshShape({}))
    return group_matrices(specs, current.rules, current.shape)


def partition(path: str, spec: ArraySpec) -> PartitionSpec:
    """Return how optimizer state of this path and spec is split over the mesh."""
    return PartitionSpec(*(names or None for names in split_of(path, spec)))


def split_of(path: str, spec: ArraySpec) -> tuple[tuple[str, ...], ...]:
    """Return the mesh axes that split each dimension of optimizer state of this path and spec."""
    current = placement()
    if current is None:
        return ((),) * len(spec.shape)
    state = ArraySpec(spec.shape, spec.axes, spec.dtype, "optimizer")
    return make_layout(f"optimizer/{path}", state, current.rules, current.shape).split


def take_matrices(shards: Sequence[jax.Array], group: MatrixGroup) -> jax.Array:
    """Return this device's whole matrices (stack, rows..., columns...) for shards of all arrays."""
    axes = group.axes.values()
    stacks = [_to_stack(shard, each) for shard, each in zip(shards, axes, strict=True)]
    stack = jnp.concatenate(stacks)
    padding = [(0, group.padded_count - group.count)] + [(0, 0)] * (stack.ndim - 1)
    stack = jnp.pad(stack, padding)
    for move in group.moves:
        stack = _take(stack, move)
    return stack


def give_back_matrices(
    stack: jax.Array, shards: Sequence[jax.Array], group: MatrixGroup
) -> tuple[jax.Array, ...]:
    """Return the shards of all arrays for this device's whole matrices; the inverse of taking.

    Args:
        stack: Whole matrices.
        shards: Arrays of the shapes of the results.
        group: The group of matrices.
    """
    axes = list(group.axes.values())
    for move in reversed(group.moves):
        stack = _give_back(stack, move)
    sizes = [
        math.prod(shard.shape[index] for index in each.stack)
        for shard, each in zip(shards, axes, strict=True)
    ]
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return tuple(
        _from_stack(stack[start : start + size], shard, each)
        for start, size, shard, each in zip(starts, sizes, shards, axes, strict=True)
    )


def _to_stack(shard: jax.Array, axes: MatrixAxes) -> jax.Array:
    """Return a shard as (stack, rows..., columns...)."""
    inner = [shard.shape[index] for index in axes.rows + axes.columns]
    return shard.transpose(axes.order).reshape(-1, *inner)


def _from_stack(stack: jax.Array, shard: jax.Array, axes: MatrixAxes) -> jax.Array:
    ordered = stack.reshape([shard.shape[index] for index in axes.order])
    return ordered.transpose([axes.order.index(index) for index in range(shard.ndim)])


def _take(stack: jax.Array, move: Move) -> jax.Array:
    """Give away parts of the stack; receive what is missing of the others."""
    if move.dimension is not None:
        return jax.lax.all_to_all(stack, move.axis, 0, move.dimension, tiled=True)
    size = len(stack) // move.devices
    start = jax.lax.axis_index(move.axis) * size
    return jax.lax.dynamic_slice_in_dim(stack, start, size)


def _give_back(stack: jax.Array, move: Move) -> jax.Array:
    """Do the inverse of `_take`."""
    if move.dimension is not None:
        return jax.lax.all_to_all(stack, move.axis, move.dimension, 0, tiled=True)
    return jax.lax.all_gather(stack, move.axis, tiled=True)
