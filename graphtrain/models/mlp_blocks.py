"""MLP whose backward pass runs in blocks of hidden columns.

The backward pass of an MLP has about seven arrays of hidden values (batch, seq, mlp) at once, and
the gathered weights and unreduced gradients of three matrices. In blocks of columns it has them of
one block: the block's hidden values are computed again from the MLP's input, and its gradients of
weights are complete, and reduced, before the next block begins. No product is computed twice if
the layer is recomputed from its input anyway, and no weight is gathered twice. The gradient of the
input is summed over the blocks.

Where the rules shard the hidden columns, their shards are an array dimension of their own, the
first. Each device then sums over its own columns, and the devices' sums are reduced once.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from graphtrain.models.activations import Activation, apply_activation
from graphtrain.models.matmul import dot, dot_many
from lowering.tracing.constrain import constrain, constrain_tree, in_shard_map, shards_of
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
    activate: Activation = field(hash=True)

    def axes(self, name: str) -> tuple[str | None, ...]:
        """Return the array axes of one block of a weight."""
        if name.endswith("_bias"):
            return (self.width, None)
        return (self.width, None, "embed") if name == "down" else ("embed", self.width, None)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def mlp_in_blocks(mlp: BlockedMLP, x: jax.Array, weights: Weights) -> jax.Array:
    """Return the MLP's output (batch, seq, embed) without the bias of its last product.

    Args:
        mlp: Settings.
        x: Input (batch, seq, embed).
        weights: gate and up (embed, mlp), down (mlp, embed), and biases (mlp).
    """
    return _output(mlp, "", x, weights)


def _output(mlp: BlockedMLP, shards: str, x: jax.Array, weights: Weights) -> jax.Array:
    """Return the output for weights, or for those of one block.

    Args:
        mlp: Settings.
        shards: Letter of the dimension of shards; empty: there is none.
        x: Input, with the dimension of shards first.
        weights: With the dimension of shards before that of columns.
    """
    columns = (mlp.width, "batch", "seq", None) if shards else ("batch", "seq", mlp.width)
    axes = (mlp.width,) if shards else ()
    with jax.named_scope("+".join(mlp.names)):
        equation = f"{shards}bse,e{shards}m->{shards}bsm"
        products = dot_many(equation, x, [weights[name] for name in mlp.names])
    wide = [
        constrain(_add_bias(product, weights.get(f"{name}_bias")), *columns)
        for name, product in zip(mlp.names, products, strict=True)
    ]
    hidden = constrain(apply_activation(mlp.activate, wide), *columns)
    with jax.named_scope("down"):
        product = dot(f"{shards}bsm,{shards}me->{shards}bse", hidden, weights["down"])
    return constrain(product, *axes, "batch", "seq", "embed") if shards else product


def _add_bias(product: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Add a bias (mlp) to (batch, seq, mlp), or (shards, mlp) to (shards, batch, seq, mlp)."""
    if bias is None:
        return product
    bias = bias if bias.ndim == 1 else bias[:, None, None]
    return product + bias.astype(product.dtype)


def _forward(
    mlp: BlockedMLP, x: jax.Array, weights: Weights
) -> tuple[jax.Array, tuple[jax.Array, Weights]]:
    return mlp_in_blocks(mlp, x, weights), (x, weights)


def _backward(
    mlp: BlockedMLP, saved: tuple[jax.Array, Weights], gradient: jax.Array
) -> tuple[jax.Array, Weights]:
    x, weights = saved
    parts = {name: _parts(mlp, name, weight) for name, weight in weights.items()}
    x, gradient = _by_shard(mlp, x), _by_shard(mlp, gradient)
    total, of_blocks = jnp.zeros_like(x), []
    for index in range(mlp.blocks):
        block = {name: part[index] for name, part in parts.items()}
        _, differentiate = jax.vjp(partial(_output, mlp, "t"), x, block)
        of_x, of_block = differentiate(gradient)
        total = of_x if index == 0 else total + of_x
        # After a barrier, so that the next block begins when this one's gradients are reduced.
        x, gradient, total, of_block = jax.lax.optimization_barrier(
            (x, gradient, total, _reduced(mlp, of_block))
        )
        of_blocks.append(of_block)
    stacked = {name: jnp.stack([of[name] for of in of_blocks]) for name in weights}
    return total.sum(0), {
        name: jnp.moveaxis(stacked[name], 0, _columns(mlp, name) + 1).reshape(weight.shape)
        for name, weight in weights.items()
    }


mlp_in_blocks.defvjp(_forward, _backward)


def _columns(mlp: BlockedMLP, name: str) -> int:
    """Return the dimension of a weight that has the hidden columns."""
    return mlp.axes(name).index(mlp.width)


def _parts(mlp: BlockedMLP, name: str, weight: jax.Array) -> jax.Array:
    """Return a weight's blocks (blocks, ..., shards, columns, ...)."""
    axis = _columns(mlp, name)
    shape = *weight.shape[:axis], shards_of(mlp.width), mlp.blocks, -1, *weight.shape[axis + 1 :]
    return jnp.moveaxis(weight.reshape(shape), axis + 1, 0)


def _by_shard(mlp: BlockedMLP, x: jax.Array) -> jax.Array:
    """Repeat (batch, seq, embed) for each shard of columns: (shards, batch, seq, embed)."""
    repeated = jnp.broadcast_to(x, (shards_of(mlp.width), *x.shape))
    return constrain(repeated, mlp.width, "batch", "seq", "embed")


def _reduced(mlp: BlockedMLP, gradients: Weights) -> Weights:
    """Shard a block's gradients as the optimizer state is; inside a shard_map, leave them."""
    if in_shard_map():
        return gradients
    specs = {
        name: ArraySpec(gradient.shape, mlp.axes(name)) for name, gradient in gradients.items()
    }
    return constrain_tree({**gradients}, specs, "optimizer")
