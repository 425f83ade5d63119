"""Gradient of the LM head: reduced and scattered before the backward pass of the layers.

Nothing reads it before the optimizer, so XLA reduces it last. Until then the gradient exists
unsharded, in float32, beside the arrays of the current layer; or, where XLA computes it last too,
the operands of its product do: the gradient of the logits and the head's input. A loss in one chunk
reduces it in blocks of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from graphtrain.models.token_shards import sum_token_shards
from lowering.tracing.constrain import constrain_tree
from lowering.tracing.context import set_context_variable
from sharding_rules.arrays import ArraySpec

_is_first: ContextVar[bool] = ContextVar("head_first", default=False)


def use_head_first(first: bool) -> AbstractContextManager[Any]:
    """Reduce the gradient of the head first in the models that are traced inside, or not.

    `head_gradient_support.reduces_head_first` decides it for a program.
    """
    return set_context_variable(_is_first, first)


def reduce_head_first(hidden: jax.Array, head: Any, axes: tuple[str, str]) -> tuple[jax.Array, Any]:
    """Return both unchanged; the gradient of `hidden` waits until that of `head` is reduced.

    Only inside `use_head_first`, and not for a head that is quantized or has LoRA factors.
    With several losses of one head, call this once, so that their gradients are reduced once.

    Args:
        hidden: Input of the head (batch, seq, embed).
        head: Weights.
        axes: Array axes of the weights.
    """
    if not _is_first.get() or not isinstance(head, jax.Array):
        return hidden, head
    return _paired(axes, hidden, head)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _paired(
    axes: tuple[str, str], hidden: jax.Array, head: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return hidden, head


def _forward(
    axes: tuple[str, str], hidden: jax.Array, head: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], None]:
    return (hidden, head), None


def _backward(
    axes: tuple[str, str], _: None, gradients: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    of_hidden, of_head = gradients
    spec = ArraySpec(of_head.shape, axes)
    of_head = constrain_tree({"head": of_head}, {"head": spec}, "optimizer")["head"]
    return jax.lax.optimization_barrier((of_hidden, of_head))


_paired.defvjp(_forward, _backward)


def keep_stored(head: jax.Array, axes: tuple[str, str]) -> jax.Array:
    """Constrain the head's weights, in any dtype, to the sharding in which they are stored."""
    spec = ArraySpec(head.shape, axes)
    return constrain_tree({"head": head}, {"head": spec}, "parameter")["head"]


def gradient_in_blocks(
    multiply: Callable[[jax.Array, jax.Array], jax.Array],
    hidden: jax.Array,
    grad_scores: jax.Array,
    axes: tuple[str, str],
    blocks: int,
) -> jax.Array:
    """Return the head's gradient, computed and reduced in blocks of the vocabulary.

    The product of a block waits until the block before the last one is reduced, so that two exist
    unsharded at once.

    Args:
        multiply: Computes the gradient by shard of the tokens (batch_shards, seq_shards, *axes)
            from hidden states and a block of the gradient of the scores.
        hidden: Hidden states.
        grad_scores: Gradient of the scores (..., vocab).
        axes: Array axes of the head.
        blocks: Number of blocks, which divides the vocabulary.
    """
    reduced: list[jax.Array] = []
    width = grad_scores.shape[-1] // blocks
    for index in range(blocks):
        of_block = jax.lax.slice_in_dim(grad_scores, index * width, (index + 1) * width, axis=-1)
        newest = sum_token_shards(multiply(hidden, of_block), axes, "head")
        if reduced:
            hidden, grad_scores, reduced[-1] = jax.lax.optimization_barrier(
                (hidden, grad_scores, reduced[-1])
            )
        reduced.append(newest)
    return jnp.concatenate(reduced, axes.index("vocab"))
