"""Gradient of the LM head, reduced and scattered before the backward pass of the layers.

Nothing reads it before the optimizer, so XLA reduces it last. Until then the gradient exists
unsharded, in float32, beside the arrays of the current layer; or, where XLA computes it last too,
the operands of its product do: the gradient of the logits and the head's input.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax

from lowering.tracing.constrain import constrain_tree, in_shard_map
from lowering.tracing.cpu_hints import on_cpu
from sharding_rules.arrays import ArraySpec


def reduce_head_first(hidden: jax.Array, head: Any, axes: tuple[str, str]) -> tuple[jax.Array, Any]:
    """Return both unchanged; the gradient of `hidden` waits until that of `head` is reduced.

    Not done on CPUs, inside a shard_map, and for a head that is quantized or has LoRA factors.
    With several losses of one head, call this once, so that their gradients are reduced once.

    Args:
        hidden: Input of the head (batch, seq, embed).
        head: Weights.
        axes: Array axes of the weights.
    """
    if on_cpu() or in_shard_map() or not isinstance(head, jax.Array):
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
