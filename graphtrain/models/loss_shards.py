"""Arrays of a chunked loss by shard of tokens and of vocabulary, and sums over these shards.

Shards are array dimensions of their own, so that a device sums what is local to it in a loop, and
the shards are summed once, after the loop.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from graphtrain.models.block import RESIDUAL_AXES
from lowering.tracing.constrain import constrain, mesh_axes_of, placement, shards_of
from lowering.tracing.deferred_gradient import as_varying
from sharding_rules.arrays import ArraySpec
from sharding_rules.plan import make_layout

TOKEN_AXES = ("batch", None, "seq", None)  # shards of batch, sequences, shards of seq, positions


def by_token_shard(x: jax.Array) -> jax.Array:
    """Reshape (batch, seq, ...) to (batch_shards, batch, seq_shards, seq, ...)."""
    batch, seq = shards_of("batch"), shards_of("seq")
    trailing = x.shape[2:]
    divided = x.reshape(batch, x.shape[0] // batch, seq, x.shape[1] // seq, *trailing)
    return constrain(divided, *TOKEN_AXES, *("embed" for _ in trailing))


def for_vocab_shards(hidden: jax.Array) -> jax.Array:
    """Repeat hidden states (batch, seq, embed) for each shard of vocab.

    Return (batch_shards, batch, seq_shards, seq, vocab_shards, embed): each device has what it had.
    """
    divided = by_token_shard(hidden)
    shape = *divided.shape[:4], shards_of("vocab"), divided.shape[4]
    return constrain(jnp.broadcast_to(divided[..., None, :], shape), *TOKEN_AXES, "vocab", "embed")


def by_vocab_shard(x: jax.Array, *axes: str | None) -> jax.Array:
    """Reshape (..., vocab, ...) to (..., vocab_shards, vocab, ...).

    Args:
        x: Array with an axis "vocab".
        axes: Its array axes.
    """
    at, shards = axes.index("vocab"), shards_of("vocab")
    divided = x.reshape(*x.shape[:at], shards, x.shape[at] // shards, *x.shape[at + 1 :])
    return constrain(divided, *axes[: at + 1], None, *axes[at + 1 :])


def filled(value: jax.Array, shape: tuple[int, ...], *axes: str | None) -> jax.Array:
    """Return an array of one value, which varies over the manual axes of a surrounding shard_map.

    Args:
        value: A scalar.
        shape: Shape of the result.
        axes: Array axes of its dimensions.
    """
    context, array = placement(), jnp.broadcast_to(value, shape)
    for mesh_axis in context.manual if context else ():
        array = as_varying(array, mesh_axis)
    return constrain(array, *axes)


def sum_vocab_shards(grad_hidden: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Sum the gradient of hidden states over the shards of vocab, to the residual stream's shards.

    The sum has the gradient's dtype, in which devices reduce it; jnp.sum would send float32.

    Args:
        grad_hidden: In the shape of for_vocab_shards.
        shape: (batch, seq, embed), of the result.
    """
    batch, seq, embed = shape
    partial_sums = grad_hidden.reshape(batch, seq, -1, embed)
    partial_sums = constrain(partial_sums, "batch", "seq", "vocab", "embed")
    zero = jnp.zeros((), grad_hidden.dtype)
    return constrain(jax.lax.reduce(partial_sums, zero, jax.lax.add, (2,)), *RESIDUAL_AXES)


def sum_token_shards(grad_head: jax.Array, axes: tuple[str, str]) -> jax.Array:
    """Sum the head's gradient over the shards of tokens.

    The sum is first over mesh axes that also shard the head, so that XLA reduces and scatters
    there, and then over the other axes, where XLA reduces only shards.
    """
    context, token_mesh_axes = placement(), (*mesh_axes_of("batch"), *mesh_axes_of("seq"))
    if context is None or not token_mesh_axes:
        return grad_head.sum((0, 1))
    shape = grad_head.shape[2:]
    sizes = [context.shape.axes[name] for name in token_mesh_axes]
    head_split = make_layout(
        "head", ArraySpec(shape, axes, role="optimizer"), context.rules, context.shape
    ).split
    head_mesh_axes = [
        name for name in token_mesh_axes if any(name in dim_axes for dim_axes in head_split)
    ]
    other_mesh_axes = [name for name in token_mesh_axes if name not in head_mesh_axes]
    partial_sums = grad_head.reshape(*sizes, *shape).sum(
        tuple(map(token_mesh_axes.index, head_mesh_axes))
    )
    spec = PartitionSpec(*other_mesh_axes, *(dim_axes or None for dim_axes in head_split))
    sharding = NamedSharding(context.current_mesh, spec)
    return jax.lax.with_sharding_constraint(partial_sums, sharding).sum(
        tuple(range(len(other_mesh_axes)))
    )
