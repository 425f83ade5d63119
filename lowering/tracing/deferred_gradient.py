"""DeferredGradient: weights whose gradient is reduced over a mesh axis at the point of use.

The scan over layers carries one DeferredGradient for each array of weights. If complete() is called inside
the loop, a layer's gradient is reduced in the loop's backward pass, where the reduction overlaps
with the backward pass of the preceding layer.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from lowering.trees import Tree


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["weights", "accumulated", "gradient"],
    meta_fields=["mesh_axis", "dimension"],
)
class DeferredGradient:
    """Weights that are replicated along a manual mesh axis, inside a shard_map over it.

    The reduced gradient is the cotangent of `gradient`, not of `weights`; it may be a shard.
    """

    def __init__(
        self,
        weights: jax.Array,
        accumulated: jax.Array,  # this device's gradient so far, added before the reduction
        gradient: jax.Array,  # zeros with the shape of the reduced gradient
        mesh_axis: str,
        dimension: int | None,  # scattered dimension, negative (-1: last); None: all-reduce
    ):
        self.weights, self.accumulated, self.gradient = weights, accumulated, gradient
        self.mesh_axis, self.dimension = mesh_axis, dimension


def attach_reductions(tree: Tree) -> Tree:
    """Replace each DeferredGradient of a tree by its weights; their gradients are reduced in backward."""
    return jax.tree.map(
        lambda leaf: _complete(leaf) if isinstance(leaf, DeferredGradient) else leaf,
        tree,
        is_leaf=lambda leaf: isinstance(leaf, DeferredGradient),
    )


def _complete(pending: DeferredGradient) -> jax.Array:
    return _weights(
        pending.mesh_axis, pending.dimension, pending.weights, pending.accumulated, pending.gradient
    )


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _weights(
    mesh_axis: str, dimension: int | None, weights: jax.Array, sums: jax.Array, slot: jax.Array
) -> jax.Array:
    return as_varying(weights, mesh_axis)


def _forward(
    mesh_axis: str, dimension: int | None, weights: jax.Array, sums: jax.Array, slot: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return as_varying(weights, mesh_axis), (weights, sums)


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


def as_varying(x: jax.Array, mesh_axis: str) -> jax.Array:
    """Return x typed as varying along a manual mesh axis; the values are unchanged."""
    if mesh_axis in jax.typeof(x).mat.varying:
        return x
    return jax.lax.pcast(x, mesh_axis, to="varying")
