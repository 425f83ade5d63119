"""Chunked LM head and cross-entropy: only the logits of one chunk of positions exist at once.

The loss ends the forward pass, so the gradient of a chunk's logits is known as soon as they are:
softmax minus one-hot, times the weight. The same loop computes the gradients of hidden states and
of the head from it, and saves them for the backward pass; no product is computed twice.

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

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from graphtrain.config.loss_positions import check_chunk
from graphtrain.models.attention.score_mods import soft_cap
from graphtrain.models.chunk_size import parts_of_chunk
from graphtrain.models.head_gradient import gradient_in_blocks, keep_stored
from graphtrain.models.loss import one_hot_mask, target_scores
from graphtrain.models.loss_shards import (
    TOKEN_AXES,
    by_token_shard,
    by_vocab_shard,
    filled,
    for_vocab_shards,
    sum_token_shards,
    sum_vocab_shards,
)
from graphtrain.models.quantized_matmul import gradient_dot, parameter_dot
from graphtrain.models.vocab_padding import mask_padding
from lowering.tracing.constrain import constrain, shards_of
from lowering.tracing.cpu_hints import materialize
from lowering.tracing.summed_gradient import SummedGradient
from lowering.tracing.tpu_hints import on_tpu

_LOCAL_DIMENSIONS = (1, 3)  # dimensions that are local to a device: sequences and positions


@dataclass(frozen=True)
class LossHead:
    """Settings of the LM head and the loss."""

    chunk: int  # positions of a sequence per chunk
    tied: bool  # the head is (vocab, embed), else (embed, vocab)
    cap: float | None  # soft cap of logits
    z_loss: float
    vocab_tokens: int | None = None  # rows of the head that stand for a token; None: all
    blocks: int = 1  # of the vocabulary, in which the head's gradient is reduced, of one chunk

    @property
    def head_axes(self) -> tuple[str, str]:
        """Array axes of the head's weights."""
        return ("vocab", "embed") if self.tied else ("embed", "vocab")

    @property
    def letters(self) -> str:
        """Array axes of the head's weights by shard of vocab, as letters of einsum equations."""
        return "kve" if self.tied else "ekv"


Head = jax.Array | SummedGradient


@jax.named_scope("loss")
def chunked_cross_entropy(
    hidden: jax.Array, head: Head, targets: jax.Array, weights: jax.Array, scored: LossHead
) -> tuple[jax.Array, jax.Array]:
    """Return the weighted sums of the objective and of -log p(target), in float32.

    The objective includes the z-loss. Only the objective has a gradient.

    Args:
        hidden: Hidden states (batch, seq, embed).
        head: Weights of the LM head. With SummedGradient, the objective must be a term of what is
            differentiated (a cotangent of 1), or else the sums become NaN.
        targets: int32 (batch, seq).
        weights: float32 (batch, seq); 0 masks a target.
        scored: Settings.

    Raises:
        ShardingError: as check_chunk.
    """
    if isinstance(head, SummedGradient):
        assert head.is_real is None and scored.blocks == 1  # as pipelines have it
        arrays = hidden, head.weights, head.sums
    else:
        arrays = hidden, head, None
    losses: Any = _losses(scored, *arrays, targets, weights)
    value, loss = losses
    return value, jax.lax.stop_gradient(loss)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _losses(scored: LossHead, *arrays: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    return _over_chunks(scored, *arrays, differentiate=False)[0]


def _losses_forward(scored: LossHead, *arrays: jax.Array | None) -> Any:
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
    return (of_hidden * factor).astype(of_hidden.dtype), of_head, new_sums, None, None


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
    tokens = [for_vocab_shards(hidden), *(by_token_shard(x) for x in (targets, weights))]
    length = tokens[0].shape[3]
    check_chunk(scored.chunk, length)
    # Cast and gathered over embed before the loop, so that this happens once.
    head_used = head.astype(hidden.dtype)
    if scored.blocks > 1:  # outside of a loop, XLA would gather float32
        head_used = keep_stored(head_used, scored.head_axes)
    head_used = constrain(head_used, *scored.head_axes)
    if on_tpu():  # narrow shards are gathered through a float32 array, after which the sums begin
        head_used, zero = jax.lax.optimization_barrier((head_used, zero))
    head_used = by_vocab_shard(head_used, *scored.head_axes)
    token_shards = tokens[0].shape[0], tokens[0].shape[2]
    sums = (filled(zero, token_shards, "batch", "seq"),) * 2
    gradients = None
    if differentiate and scored.blocks == 1:
        shape = *token_shards, *head.shape
        if earlier is not None and token_shards == (1, 1):
            grad_head, earlier = earlier.reshape(shape), None
        else:
            grad_head = filled(zero, shape, "batch", "seq", *scored.head_axes)
        gradients = tokens[0], grad_head  # each chunk's gradient replaces its hidden states
    parts = parts_of_chunk(tokens[0].shape[1], scored.chunk, shards_of("vocab"))
    grad_scores = None
    if differentiate and parts > 1:
        grad_scores = _room_for_parts(scored, tokens[0], head, zero)
    if differentiate and scored.blocks > 1:
        sums, gradients = _in_one_chunk(scored, parts, tokens, head_used, grad_scores)
        return (sums[0].sum(), sums[1].sum()), (
            sum_vocab_shards(gradients[0], hidden.shape),
            gradients[1].astype(head.dtype),
        )

    def add(carry: Any, index: jax.Array) -> tuple[Any, None]:
        sums, gradients, grad_scores = carry
        start = index * scored.chunk
        arrays = tokens if gradients is None else (gradients[0], *tokens[1:])
        chunk = [jax.lax.dynamic_slice_in_dim(x, start, scored.chunk, 3) for x in arrays]
        if parts == 1:
            chunk_sums, of_scores = _scored(scored, chunk, head_used, differentiate)
        else:
            chunk_sums, of_scores = _scored_in_parts(scored, parts, chunk, head_used, grad_scores)
            grad_scores = of_scores
        sums = jax.tree.map(jnp.add, sums, chunk_sums)
        if gradients is None or of_scores is None:
            return (sums, None, None), None
        grad_hidden, grad_head = gradients
        chunk_grad_hidden = _grad_hidden(scored, head_used, of_scores)
        chunk_grad_head = _grad_head(scored, chunk[0], of_scores)
        grad_hidden = jax.lax.dynamic_update_slice_in_dim(grad_hidden, chunk_grad_hidden, start, 3)
        return (sums, (grad_hidden, grad_head + chunk_grad_head), grad_scores), None

    chunk_indices = jnp.arange(length // scored.chunk)
    carry = sums, gradients, grad_scores
    (sums, gradients, _), _ = jax.lax.scan(_opaque(add), carry, chunk_indices)
    value, loss = (x.sum() for x in sums)
    if gradients is None:
        return (value, loss), None
    grad_hidden, grad_head = gradients
    of_head = sum_token_shards(grad_head, scored.head_axes).astype(head.dtype)
    if earlier is not None:
        of_head += earlier
    return (value, loss), (
        sum_vocab_shards(grad_hidden, hidden.shape),
        of_head,
    )


def _in_one_chunk(
    scored: LossHead,
    parts: int,
    tokens: list[jax.Array],
    head: jax.Array,
    grad_scores: jax.Array | None,
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """Return both losses by shard, and the gradients of hidden states and head.

    All scores have their gradient at once, and the head's gradient is reduced in blocks. Arguments
    are those of `_scored_in_parts`.
    """
    if parts == 1:
        sums, of_scores = _scored(scored, tokens, head, differentiate=True)
    else:
        sums, of_scores = _scored_in_parts(scored, parts, tokens, head, grad_scores)
    assert of_scores is not None
    grad_head = gradient_in_blocks(
        partial(_grad_head, scored), tokens[0], of_scores, scored.head_axes, scored.blocks
    )
    return sums, (_grad_hidden(scored, head, of_scores), grad_head)


def _room_for_parts(
    scored: LossHead, hidden: jax.Array, head: jax.Array, zero: jax.Array
) -> jax.Array:
    """Return zeros in the shape of the gradient of a chunk's scores, which every chunk overwrites.

    Args:
        scored: Settings.
        hidden: All hidden states, by shard.
        head: Weights of the LM head.
        zero: A scalar.
    """
    vocab = head.shape[scored.head_axes.index("vocab")]
    shape = *hidden.shape[:3], scored.chunk, vocab
    return filled(zero.astype(hidden.dtype), shape, *TOKEN_AXES, "vocab")


def _scored_in_parts(
    scored: LossHead,
    parts: int,
    chunk: list[jax.Array],
    head: jax.Array,
    grad_scores: jax.Array | None,
) -> tuple[tuple[jax.Array, jax.Array], jax.Array | None]:
    """Return what `_scored` does for a chunk; float32 scores exist for one part of it at once.

    Args:
        scored: Settings.
        parts: Number of parts.
        chunk: Hidden states, targets and weights of the chunk.
        head: Weights of the LM head.
        grad_scores: Array that the gradient replaces; None: no gradient.
    """
    part_length = chunk[0].shape[3] // parts

    def add(carry: Any, index: jax.Array) -> tuple[Any, None]:
        sums, grad_scores = carry
        start = index * part_length
        part = [jax.lax.dynamic_slice_in_dim(x, start, part_length, 3) for x in chunk]
        part_sums, of_part = _scored(scored, part, head, grad_scores is not None)
        if grad_scores is not None and of_part is not None:
            grad_scores = jax.lax.dynamic_update_slice_in_dim(grad_scores, of_part, start, 3)
        return (jax.tree.map(jnp.add, sums, part_sums), grad_scores), None

    shards = chunk[0].shape[0], chunk[0].shape[2]
    sums = (filled(jnp.zeros(()), shards, "batch", "seq"),) * 2
    carry: Any = sums, grad_scores
    return jax.lax.scan(_opaque(add), carry, jnp.arange(parts))[0]


def _opaque(body: Callable[..., Any]) -> Callable[..., Any]:
    """Return the body of a loop from which JAX hoists nothing.

    Where a pipeline recomputes the loss, JAX would put zeros and token ids, both in the shape of
    the logits, before the loop: arrays that exist during all of it. There is no gradient here.
    """
    return jax.checkpoint(body, prevent_cse=False)


def _scored(
    scored: LossHead, chunk: list[jax.Array], head: jax.Array, differentiate: bool
) -> tuple[tuple[jax.Array, jax.Array], jax.Array | None]:
    """Return both losses of a chunk by shard, and the first's gradient for the head's products."""
    hidden, targets, weights = chunk
    with jax.named_scope("head"):
        equation = f"nbcske,{scored.letters}->nbcskv"
        products = parameter_dot(("head",), equation, hidden, head, jnp.float32)
        capped = soft_cap(products.reshape(*products.shape[:4], -1), scored.cap)
        masked = mask_padding(capped, scored.vocab_tokens or capped.shape[-1])
        scores = constrain(masked, *TOKEN_AXES, "vocab")
    highest = scores.max(-1)
    powers = materialize(jnp.exp(scores - highest[..., None]))
    total = powers.sum(-1)
    log_z = jnp.log(total) + highest
    losses = log_z - target_scores(scores, targets)
    values = losses + scored.z_loss * log_z**2
    sums = (values * weights).sum(_LOCAL_DIMENSIONS), (losses * weights).sum(_LOCAL_DIMENSIONS)
    if not differentiate:
        return sums, None
    grad_log_z = weights * (1 + 2 * scored.z_loss * log_z) / total
    target_weights = jnp.where(one_hot_mask(scores, targets), weights[..., None], 0.0)
    grad_scores = powers * grad_log_z[..., None] - target_weights
    if scored.cap is not None:
        grad_scores = grad_scores * (1 - jnp.square(scores / scored.cap))
    return sums, materialize(grad_scores.astype(hidden.dtype))


@jax.named_scope("head")
def _grad_hidden(scored: LossHead, head: jax.Array, grad_scores: jax.Array) -> jax.Array:
    """Return the gradient of a chunk's hidden states, a partial sum for each shard of vocab."""
    grad_scores = by_vocab_shard(grad_scores, *TOKEN_AXES, "vocab")
    equation = f"nbcskv,{scored.letters}->nbcske"
    return gradient_dot("head", grad_scores)(equation, grad_scores, head, grad_scores.dtype)


@jax.named_scope("head")
def _grad_head(scored: LossHead, hidden: jax.Array, grad_scores: jax.Array) -> jax.Array:
    """Return a chunk's gradient of the head, by shard of the tokens, in float32."""
    grad_scores = by_vocab_shard(grad_scores, *TOKEN_AXES, "vocab")
    equation = f"nbcske,nbcskv->nc{scored.letters}"
    grad_head = gradient_dot("head", grad_scores)(equation, hidden, grad_scores, jnp.float32)
    rows, columns = (-1, hidden.shape[-1]) if scored.tied else (hidden.shape[-1], -1)
    return grad_head.reshape(*grad_head.shape[:2], rows, columns)
