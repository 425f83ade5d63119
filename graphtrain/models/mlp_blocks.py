"""MLP whose backward pass runs in blocks of hidden columns.

The backward pass of an MLP has about seven arrays of hidden values (batch, seq, mlp) at once, and
the gathered weights and unreduced gradients of three matrices. In blocks of columns it has them of
one block: the block's hidden values are computed again from the MLP's input, and its gradients of
weights are complete, and reduced, before the next block begins. No product is computed twice if
the layer is recomputed from its input anyway, and nothing there reads the MLP's output. No weight
is gathered twice. The gradient of the input is summed over the blocks, in the input's dtype.

No mesh axis shards the hidden columns (mlp_block_count).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from graphtrain.models.activations import Activation, apply_activation
from graphtrain.models.matmul import dot, dot_many
from lowering.tracing.constrain import constrain, constrain_tree, in_shard_map
from lowering.tracing.context import set_context_variable
from sharding_rules.arrays import ArraySpec

Weights = Mapping[str, jax.Array]  # by name: gate, up, down, gate_bias, up_bias

_count: ContextVar[int] = ContextVar("mlp_blocks", default=1)


def use_mlp_blocks(count: int) -> AbstractContextManager[Any]:
    """Differentiate the MLPs that are traced inside in so many blocks of hidden columns."""
    return set_context_variable(_count, count)


def current_mlp_blocks() -> int:
    """Return the number of blocks of the MLPs that are being traced; 1 without use_mlp_blocks."""
    return _count.get()


@dataclass(frozen=True)
class BlockedMLP:
    """Settings of an MLP in blocks."""

    blocks: int
    width: str  # array axis of the hidden columns
    names: tuple[str, ...]  # of the projections to hidden columns: gate and up, or up
    activate: Activation

    def axes(self, name: str) -> tuple[str, ...]:
        """Return the array axes of a weight."""
        if name.endswith("_bias"):
            return (self.width,)
        return (self.width, "embed") if name == "down" else ("embed", self.width)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def mlp_in_blocks(mlp: BlockedMLP, x: jax.Array, weights: Weights) -> jax.Array:
    """Return the MLP's output (batch, seq, embed) without the bias of its last product.

    Args:
        mlp: Settings.
        x: Input (batch, seq, embed).
        weights: gate and up (embed, mlp), down (mlp, embed), and biases (mlp).
    """
    return _output(mlp, x, weights)


def _output(mlp: BlockedMLP, x: jax.Array, weights: Weights) -> jax.Array:
    """Return the output for all columns of the weights, or for those of one block."""
    columns = ("batch", "seq", mlp.width)
    with jax.named_scope("+".join(mlp.names)):
        products = dot_many("bse,em->bsm", x, [weights[name] for name in mlp.names])
    wide = [
        constrain(_add_bias(product, weights.get(f"{name}_bias")), *columns)
        for name, product in zip(mlp.names, products, strict=True)
    ]
    hidden = constrain(apply_activation(mlp.activate, wide), *columns)
    with jax.named_scope("down"):
        return dot("bsm,me->bse", hidden, weights["down"])


def _add_bias(product: jax.Array, bias: jax.Array | None) -> jax.Array:
    return product if bias is None else product + bias.astype(product.dtype)


def _forward(
    mlp: BlockedMLP, x: jax.Array, weights: Weights
) -> tuple[jax.Array, tuple[jax.Array, Weights]]:
    return mlp_in_blocks(mlp, x, weights), (x, weights)


def _backward(
    mlp: BlockedMLP, saved: tuple[jax.Array, Weights], gradient: jax.Array
) -> tuple[jax.Array, Weights]:
    x, weights = saved
    columns = {name: mlp.axes(name).index(mlp.width) for name in weights}
    parts = {name: jnp.split(w, mlp.blocks, columns[name]) for name, w in weights.items()}
    total, of_blocks = None, []
    for index in range(mlp.blocks):
        block = {name: part[index] for name, part in parts.items()}
        _, differentiate = jax.vjp(partial(_output, mlp), x, block)
        of_x, of_block = differentiate(gradient)
        total = of_x if total is None else total + of_x
        # After a barrier, so that the next block begins when this one's gradients are reduced.
        x, gradient, total, of_block = jax.lax.optimization_barrier(
            (x, gradient, total, _reduced(mlp, of_block))
        )
        of_blocks.append(of_block)
    assert total is not None
    return total, {
        name: jnp.concatenate([of[name] for of in of_blocks], columns[name]) for name in weights
    }


mlp_in_blocks.defvjp(_forward, _backward)


def _reduced(mlp: BlockedMLP, gradients: Weights) -> Weights:
    """Shard a block's gradients as the optimizer state is; inside a shard_map, leave them."""
    if in_shard_map():
        return gradients
    specs = {
        name: ArraySpec(gradient.shape, mlp.axes(name)) for name, gradient in gradients.items()
    }
    return constrain_tree({**gradients}, specs, "optimizer")
