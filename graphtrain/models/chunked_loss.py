"""Chunked LM head and cross-entropy: only the logits of one chunk of positions exist at once.

The loss ends the forward pass, so the gradient of a chunk's logits is known as soon as they are.
The same loop computes the gradients of hidden states and of the head from it, and saves them for
the backward pass; no product is computed twice.

Where the rules shard batch and seq, their shards are array dimensions of their own, here called
batch_shards and seq_shards. Each device then sums the head's gradient and the loss over its local
tokens only, and these sums are reduced once, after the loop. The gradient of hidden states has such
a dimension for the shards of vocab, each of which computes a partial sum, and is reduced once too.
In the loop, only maxima and sums over a sharded vocabulary are: three float32 for each token.

Source: Wijmans et al. 2024, "Cut your losses", https://arxiv.org/abs/2411.09009, for the problem;
Hsu et al. 2024, "Liger kernel", section 3.2, https://arxiv.org/abs/2410.10989, for gradients that
are computed in the forward pass
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from graphtrain.config.loss_positions import check_chunk
from graphtrain.models.chunk_losses import (
    POSITIONS,
    LossHead,
    Sums,
    chunk_grad_head,
    chunk_grad_hidden,
    chunk_losses,
    opaque,
    room_for_parts,
)
from graphtrain.models.chunk_size import parts_of_chunk
from graphtrain.models.head_gradient import gradient_in_blocks, keep_stored
from graphtrain.models.loss_shards import (
    by_vocab_shard,
    filled,
    for_vocab_shards,
    sum_vocab_shards,
)
from graphtrain.models.token_shards import by_token_shard, sum_token_shards
from graphtrain.models.unnormed import ChunkNorm, Scales, Unnormed, zero_scales
from lowering.tracing.constrain import constrain, shards_of
from lowering.tracing.summed_gradient import SummedGradient
from lowering.tracing.tpu_hints import on_tpu

Head = jax.Array | SummedGradient
Hidden = jax.Array | Unnormed

Gradients = tuple[jax.Array, Scales, jax.Array]  # of what chunks norm, its scales, and the head
# The gradient of a chunk's scores is kept between chunks, in one array, if it has parts.
_Carry = tuple[Sums, Gradients | None, jax.Array | None]


@jax.named_scope("loss")
def chunked_cross_entropy(
    hidden: Hidden, head: Head, targets: jax.Array, weights: jax.Array, scored: LossHead
) -> tuple[jax.Array, jax.Array]:
    """Return the weighted sums of the objective and of -log p(target), in float32.

    The objective includes the z-loss. Only the objective has a gradient.

    Args:
        hidden: Hidden states (batch, seq, embed), or those that each chunk norms.
        head: Weights of the LM head. With SummedGradient, the objective must be a term of what is
            differentiated (a cotangent of 1), or else the sums become NaN.
        targets: int32 (batch, seq).
        weights: float32 (batch, seq); 0 masks a target.
        scored: Settings.

    Raises:
        ShardingError: as check_chunk.
    """
    if isinstance(hidden, Unnormed) and scored.blocks > 1:  # all of it is one chunk
        hidden = hidden.normed()
    if isinstance(head, SummedGradient):
        assert head.is_real is None and scored.blocks == 1  # as pipelines have it
        arrays = hidden, head.weights, head.sums
    else:
        arrays = hidden, head, None
    losses: Any = _losses(scored, *arrays, targets, weights)
    value, loss = losses
    return value, jax.lax.stop_gradient(loss)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _losses(scored: LossHead, *arrays: Any) -> tuple[jax.Array, jax.Array]:
    return _over_chunks(scored, *arrays, differentiate=False)[0]


def _losses_forward(scored: LossHead, *arrays: Any) -> Any:
    losses, (of_hidden, of_head) = _over_chunks(scored, *arrays, differentiate=True)
    is_sum = arrays[2] is not None
    return losses, (of_hidden, None, of_head) if is_sum else (of_hidden, of_head, None)


def _losses_backward(scored: LossHead, saved: Any, cotangents: tuple[jax.Array, jax.Array]) -> Any:
    of_hidden, of_head, new_sums = saved
    factor = cotangents[0]
    if new_sums is None:
        of_head = of_head * factor
    else:  # the earlier gradients in it must not be multiplied
        new_sums = jnp.where(factor == 1, new_sums, jnp.nan)
    of_hidden = jax.tree.map(lambda x: (x * factor).astype(x.dtype), of_hidden)
    return of_hidden, of_head, new_sums, None, None


_losses.defvjp(_losses_forward, _losses_backward)


def _over_chunks(
    scored: LossHead,
    hidden: Any,
    head: Any,
    earlier: jax.Array | None,
    targets: Any,
    weights: Any,
    *,
    differentiate: bool,
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    """Return both losses, and the gradients of the first for hidden states and head, if wanted.

    The gradient of the head is added to `earlier` ones, if there are any.
    """
    # A zero that depends on the hidden states: XLA would fill arrays with zeros that depend on
    # nothing before the forward pass, where they exist beside the arrays of a layer.
    hidden, zero = jax.lax.optimization_barrier((hidden, jnp.zeros(())))
    norm = ChunkNorm(hidden)
    x = norm.x
    tokens = [for_vocab_shards(x), *(by_token_shard(each) for each in (targets, weights))]
    shards = tokens[0].shape[0], tokens[0].shape[2]
    check_chunk(scored.chunk, tokens[0].shape[POSITIONS])
    used, zero = _gathered(scored, head, x.dtype, zero)
    parts = parts_of_chunk(tokens[0].shape[1], scored.chunk, shards_of("vocab"))
    grad_scores = None
    if differentiate and parts > 1:
        grad_scores = room_for_parts(scored, tokens[0], head, zero)
    if differentiate and scored.blocks > 1:
        sums, gradients = _in_one_chunk(scored, parts, tokens, used, grad_scores)
    else:
        gradients, scales = None, norm.scales(shards)
        if differentiate:
            grad_head, earlier = _begin_head_gradient(scored, (*shards, *head.shape), earlier, zero)
            # Each chunk's gradient replaces its hidden states.
            gradients = tokens[0], zero_scales(scales, zero), grad_head
        zeros = filled(zero, shards, "batch", "seq")
        begun = (zeros, zeros), gradients, grad_scores
        chunks = _Chunks(scored, parts, norm, scales, tokens, used)
        sums, gradients = _in_loop(chunks, begun)
    losses = sums[0].sum(), sums[1].sum()
    if gradients is None:
        return losses, None
    grad_x, grad_scales, grad_head = gradients
    of_head = grad_head.astype(head.dtype)
    if earlier is not None:
        of_head += earlier
    return losses, (norm.gradient(sum_vocab_shards(grad_x, x.shape), grad_scales), of_head)


def _gathered(
    scored: LossHead, head: jax.Array, dtype: Any, zero: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the head's weights, cast and gathered over embed once, by shard of vocab; and zero."""
    used = head.astype(dtype)
    if scored.blocks > 1:  # outside of a loop, XLA would gather float32
        used = keep_stored(used, scored.head_axes)
    used = constrain(used, *scored.head_axes)
    if on_tpu():  # narrow shards are gathered through a float32 array, after which the sums begin
        used, zero = jax.lax.optimization_barrier((used, zero))
    return by_vocab_shard(used, *scored.head_axes), zero


def _begin_head_gradient(
    scored: LossHead, shape: tuple[int, ...], earlier: jax.Array | None, zero: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """Return the array to which chunks add, and the earlier gradients if it does not have them.

    Args:
        scored: Settings.
        shape: (batch_shards, seq_shards, *shape of the head).
        earlier: Earlier gradients of the head.
        zero: A scalar.
    """
    if earlier is not None and shape[:2] == (1, 1):
        return earlier.reshape(shape), None
    return filled(zero, shape, "batch", "seq", *scored.head_axes), earlier


def _in_one_chunk(
    scored: LossHead,
    parts: int,
    tokens: list[jax.Array],
    head: jax.Array,
    grad_scores: jax.Array | None,
) -> tuple[Sums, Gradients]:
    """Return both losses by shard, and the gradients.

    All scores have their gradient at once, and the head's gradient is reduced in blocks. Arguments
    are those of chunk_losses.
    """
    sums, of_scores = chunk_losses(scored, parts, tokens, head, grad_scores, differentiate=True)
    assert of_scores is not None
    multiply = partial(chunk_grad_head, scored)
    grad_head = gradient_in_blocks(multiply, tokens[0], of_scores, scored.head_axes, scored.blocks)
    return sums, (chunk_grad_hidden(scored, head, of_scores), (), grad_head)


@dataclass(frozen=True)
class _Chunks:
    """Arrays and settings that all chunks read."""

    scored: LossHead
    parts: int  # of a chunk
    norm: ChunkNorm
    scales: Scales  # of the norm, by shard
    tokens: list[jax.Array]  # hidden states, targets and weights, by shard of the tokens
    head: jax.Array  # weights in use


def _in_loop(chunks: _Chunks, begun: _Carry) -> tuple[Sums, Gradients | None]:
    """Return both losses by shard, and the gradients, if `begun` has any.

    Args:
        chunks: Arrays and settings.
        begun: Arrays to which the first chunk adds.
    """
    indices = jnp.arange(chunks.tokens[0].shape[POSITIONS] // chunks.scored.chunk)
    (sums, gradients, _), _ = jax.lax.scan(opaque(partial(_add_chunk, chunks)), begun, indices)
    if gradients is None:
        return sums, None
    grad_x, grad_scales, grad_head = gradients
    of_head = sum_token_shards(grad_head, chunks.scored.head_axes, "head")
    return sums, (grad_x, grad_scales, of_head)


def _add_chunk(chunks: _Chunks, carry: _Carry, index: jax.Array) -> tuple[_Carry, None]:
    """Add the losses and gradients of the chunk with this index."""
    sums, gradients, grad_scores = carry
    scored, start = chunks.scored, index * chunks.scored.chunk
    arrays = chunks.tokens if gradients is None else (gradients[0], *chunks.tokens[1:])
    x, *labels = (
        jax.lax.dynamic_slice_in_dim(array, start, scored.chunk, POSITIONS) for array in arrays
    )
    hidden, of_norm = jax.vjp(chunks.norm.norm, x, chunks.scales)
    chunk_sums, of_scores = chunk_losses(
        scored,
        chunks.parts,
        [hidden, *labels],
        chunks.head,
        grad_scores,
        differentiate=gradients is not None,
    )
    sums = jax.tree.map(jnp.add, sums, chunk_sums)
    if gradients is None or of_scores is None:
        return (sums, None, None), None
    grad_x, grad_scales, grad_head = gradients
    of_x, of_scales = of_norm(chunk_grad_hidden(scored, chunks.head, of_scores))
    of_head = chunk_grad_head(scored, hidden, of_scores)
    gradients = (
        jax.lax.dynamic_update_slice_in_dim(grad_x, of_x, start, POSITIONS),
        jax.tree.map(jnp.add, grad_scales, of_scales),
        grad_head + of_head,
    )
    return (sums, gradients, of_scores if chunks.parts > 1 else None), None
