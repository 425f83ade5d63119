"""Pending: an array of weights whose gradient is reduced over a mesh axis where it is used.

A stack of layers carries one Pending for each array through its scan. Completed inside the loop, it
reduces a layer's gradient in the loop's backward pass, beside the work of the layer before.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from lowering.trees import Tree


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["weights", "sums", "slot"],
    meta_fields=["mesh_axis", "dimension"],
)
class Pending:
    """Weights that are equal along a mesh axis, inside a shard_map over it.

    The gradient arrives at the slot, not at the weights: a slot may be a piece of them.
    """

    def __init__(
        self,
        weights: jax.Array,
        sums: jax.Array,  # of earlier gradients on this device, to be reduced with the last
        slot: jax.Array,  # zeros of the shape in which the gradient rests
        mesh_axis: str,
        dimension: int | None,  # that the reduction splits, from the end (-1: last); None: none
    ):
        self.weights, self.sums, self.slot = weights, sums, slot
        self.mesh_axis, self.dimension = mesh_axis, dimension


def complete(tree: Tree) -> Tree:
    """The tree with weights in place of what is pending."""
    return jax.tree.map(
        lambda leaf: _complete(leaf) if isinstance(leaf, Pending) else leaf,
        tree,
        is_leaf=lambda leaf: isinstance(leaf, Pending),
    )


def _complete(pending: Pending) -> jax.Array:
    return _weights(
        pending.mesh_axis, pending.dimension, pending.weights, pending.sums, pending.slot
    )


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _weights(
    mesh_axis: str, dimension: int | None, weights: jax.Array, sums: jax.Array, slot: jax.Array
) -> jax.Array:
    return vary(weights, mesh_axis)


def _forward(
    mesh_axis: str, dimension: int | None, weights: jax.Array, sums: jax.Array, slot: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return vary(weights, mesh_axis), (weights, sums)


def _backward(
    mesh_axis: str,
    dimension: int | None,
    residuals: tuple[jax.Array, jax.Array],
    gradient: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    weights, sums = residuals
    total = gradient + sums
    if dimension is None:
        reduced = jax.lax.psum(total, mesh_axis)
    else:
        position = total.ndim + dimension
        reduced = jax.lax.psum_scatter(total, mesh_axis, scatter_dimension=position, tiled=True)
    return jnp.zeros_like(weights), jnp.zeros_like(sums), reduced


_weights.defvjp(_forward, _backward)


def vary(x: jax.Array, mesh_axis: str) -> jax.Array:
    """The same values, typed as if they differed along a mesh axis of a shard_map."""
    if mesh_axis in jax.typeof(x).mat.varying:
        return x
    return jax.lax.pcast(x, mesh_axis, to="varying")
