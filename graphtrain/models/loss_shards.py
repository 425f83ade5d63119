"""Arrays of a chunked loss by shard of the vocabulary, and sums over these shards.

As those of tokens (`token_shards`), shards are an array dimension of their own, so that a device
sums what is local to it in a loop, and the shards are summed once, after the loop.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from graphtrain.models.block import RESIDUAL_AXES
from graphtrain.models.token_shards import TOKEN_AXES, by_token_shard
from lowering.tracing.constrain import constrain, placement, shards_of
from lowering.tracing.deferred_gradient import as_varying


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
