"""Arrays by shard of the tokens, and sums over these shards.

Shards of batch and of seq are array dimensions of their own, so that a device sums what is local to
it, and code decides when the shards are summed.
"""

from __future__ import annotations

import jax
from jax.sharding import NamedSharding, PartitionSpec

from lowering.tracing.constrain import constrain, mesh_axes_of, placement, shards_of
from sharding_rules.arrays import ArraySpec
from sharding_rules.plan import make_layout

TOKEN_AXES = ("batch", None, "seq", None)  # shards of batch, sequences, shards of seq, positions


def by_token_shard(x: jax.Array, axis: str = "embed") -> jax.Array:
    """Reshape (batch, seq, ...) to (batch_shards, batch, seq_shards, seq, ...).

    Args:
        x: Array by position.
        axis: Array axis of further dimensions.
    """
    batch, seq = shards_of("batch"), shards_of("seq")
    trailing = x.shape[2:]
    divided = x.reshape(batch, x.shape[0] // batch, seq, x.shape[1] // seq, *trailing)
    return constrain(divided, *TOKEN_AXES, *(axis for _ in trailing))


def sum_token_shards(gradient: jax.Array, axes: tuple[str, str], path: str) -> jax.Array:
    """Sum the gradient of a matrix of weights over the shards of tokens.

    The sum is first over mesh axes that also shard the gradient, so that XLA reduces and scatters
    there, and then over the other axes, where XLA reduces only shards.

    Args:
        gradient: (batch_shards, seq_shards, rows, columns).
        axes: Array axes of rows and columns.
        path: Path of the weights, for errors.
    """
    context, token_mesh_axes = placement(), (*mesh_axes_of("batch"), *mesh_axes_of("seq"))
    if context is None or not token_mesh_axes:
        return gradient.sum((0, 1))
    shape = gradient.shape[2:]
    sizes = [context.shape.axes[name] for name in token_mesh_axes]
    spec = ArraySpec(shape, axes, role="optimizer")
    split = make_layout(path, spec, context.rules, context.shape).split
    scattered = [name for name in token_mesh_axes if any(name in dim_axes for dim_axes in split)]
    others = [name for name in token_mesh_axes if name not in scattered]
    partial_sums = gradient.reshape(*sizes, *shape).sum(
        tuple(map(token_mesh_axes.index, scattered))
    )
    partition = PartitionSpec(*others, *(dim_axes or None for dim_axes in split))
    sharding = NamedSharding(context.current_mesh, partition)
    return jax.lax.with_sharding_constraint(partial_sums, sharding).sum(tuple(range(len(others))))
