"""Losses of one chunk of positions, and the gradients of its products with the LM head.

The gradient of a chunk's logits is softmax minus one-hot, times the weight. The float32 logits are
computed in parts of the chunk; their gradient, in the model's dtype, exists for all of it.

Arrays have the shards of batch, seq and vocab as dimensions of their own; see `chunked_loss`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from graphtrain.models.attention.score_mods import soft_cap
from graphtrain.models.loss import one_hot_mask, target_scores
from graphtrain.models.loss_shards import by_vocab_shard, filled
from graphtrain.models.quantized_matmul import gradient_dot, parameter_dot
from graphtrain.models.token_shards import TOKEN_AXES
from graphtrain.models.vocab_padding import mask_padding
from lowering.tracing.constrain import constrain
from lowering.tracing.cpu_hints import materialize

POSITIONS = 3  # dimension of the positions that are local to a device
_LOCAL_DIMENSIONS = (1, POSITIONS)  # sequences and positions

Sums = tuple[jax.Array, jax.Array]  # of the objective and of -log p(target), by shard of the tokens


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


def chunk_losses(
    scored: LossHead,
    parts: int,
    chunk: list[jax.Array],
    head: jax.Array,
    grad_scores: jax.Array | None,
    *,
    differentiate: bool,
) -> tuple[Sums, jax.Array | None]:
    """Return the losses of a chunk, and the first's gradient for the scores, if wanted.

    Args:
        scored: Settings.
        parts: Number of parts, of which one has float32 scores at once.
        chunk: Hidden states, targets and weights of the chunk.
        head: Weights of the LM head.
        grad_scores: Array of room_for_parts that the gradient replaces, if there are parts.
        differentiate: Whether to compute the gradient.
    """
    if parts == 1:
        return _scored(scored, chunk, head, differentiate)
    part_length = chunk[0].shape[POSITIONS] // parts

    def add(carry: Any, index: jax.Array) -> tuple[Any, None]:
        sums, grad_scores = carry
        start = index * part_length
        part = [jax.lax.dynamic_slice_in_dim(x, start, part_length, POSITIONS) for x in chunk]
        part_sums, of_part = _scored(scored, part, head, differentiate)
        if of_part is not None:
            grad_scores = jax.lax.dynamic_update_slice_in_dim(
                grad_scores, of_part, start, POSITIONS
            )
        return (jax.tree.map(jnp.add, sums, part_sums), grad_scores), None

    shards = chunk[0].shape[0], chunk[0].shape[2]
    zero = filled(jnp.zeros(()), shards, "batch", "seq")
    begun: Any = (zero, zero), grad_scores
    return jax.lax.scan(opaque(add), begun, jnp.arange(parts))[0]


def room_for_parts(
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
    shape = *hidden.shape[:POSITIONS], scored.chunk, vocab
    return filled(zero.astype(hidden.dtype), shape, *TOKEN_AXES, "vocab")


def opaque(body: Callable[..., Any]) -> Callable[..., Any]:
    """Return the body of a loop from which JAX hoists nothing.

    Where a pipeline recomputes the loss, JAX would put zeros and token ids, both in the shape of
    the logits, before the loop: arrays that exist during all of it. There is no gradient here.
    """
    return jax.checkpoint(body, prevent_cse=False)


def _scored(
    scored: LossHead, chunk: list[jax.Array], head: jax.Array, differentiate: bool
) -> tuple[Sums, jax.Array | None]:
    """Return what chunk_losses does, without parts."""
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
def chunk_grad_hidden(scored: LossHead, head: jax.Array, grad_scores: jax.Array) -> jax.Array:
    """Return the gradient of a chunk's hidden states, a partial sum for each shard of vocab."""
    grad_scores = by_vocab_shard(grad_scores, *TOKEN_AXES, "vocab")
    equation = f"nbcskv,{scored.letters}->nbcske"
    return gradient_dot("head", grad_scores)(equation, grad_scores, head, grad_scores.dtype)


@jax.named_scope("head")
def chunk_grad_head(scored: LossHead, hidden: jax.Array, grad_scores: jax.Array) -> jax.Array:
    """Return a chunk's gradient of the head, by shard of the tokens, in float32."""
    grad_scores = by_vocab_shard(grad_scores, *TOKEN_AXES, "vocab")
    equation = f"nbcske,nbcskv->nc{scored.letters}"
    grad_head = gradient_dot("head", grad_scores)(equation, hidden, grad_scores, jnp.float32)
    rows, columns = (-1, hidden.shape[-1]) if scored.tied else (hidden.shape[-1], -1)
    return grad_head.reshape(*grad_head.shape[:2], rows, columns)
