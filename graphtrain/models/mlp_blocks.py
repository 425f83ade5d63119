"""MLP whose backward pass runs in blocks of hidden columns.

The backward pass of an MLP has about seven arrays of hidden values (batch, seq, mlp) at once, and
the gathered weights and unreduced gradients of three matrices. In blocks of columns it has four
arrays, weights and gradients of one block: the block's hidden values are computed again from the
MLP's input, and its gradients of weights are complete, and reduced, before those of the next block.
No product is computed twice if the layer is recomputed from its input anyway, and nothing there
reads the MLP's output. No weight is gathered twice. The gradient of the input is summed over the
blocks, in the input's dtype. The forward pass is in fewer blocks, over which it sums the output.

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
from graphtrain.models.matmul import dot
from lowering.tracing.constrain import constrain, constrain_tree
from lowering.tracing.context import set_context_variable
from lowering.tracing.tpu_hints import on_tpu
from sharding_rules.arrays import ArraySpec

# The forward pass has fewer arrays of hidden values, and no gradients beside them.
_BACKWARD_OVER_FORWARD = 4  # blocks

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

    def columns(self, name: str) -> int:
        """Return the dimension of a weight's columns."""
        return self.axes(name).index(self.width)


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
    """Return the output, in fewer blocks than the backward pass has; on TPUs in one."""
    count = 1 if on_tpu() else max(1, mlp.blocks // _BACKWARD_OVER_FORWARD)
    blocks = _split(mlp, weights, count)
    total = _output_of(mlp, x, blocks[0])
    for index in range(1, len(blocks)):
        # This block begins when the one before is done, and weights of the next are gathered then.
        x, total, blocks[index + 1 :] = jax.lax.optimization_barrier(
            (x, total, blocks[index + 1 :])
        )
        total = _output_of(mlp, x, blocks[index]) + total  # in this order: XLA adds in the product
    return total


def _output_of(mlp: BlockedMLP, x: jax.Array, block: Weights) -> jax.Array:
    """Return a block's part of the output."""
    wide = _projections(mlp, [x] * len(mlp.names), block)
    return _down(_activated(mlp, wide), block["down"])


def _split(mlp: BlockedMLP, weights: Weights, blocks: int) -> list[Weights]:
    """Return the weights of each block of columns."""
    parts = {name: jnp.split(w, blocks, mlp.columns(name)) for name, w in weights.items()}
    return [{name: part[index] for name, part in parts.items()} for index in range(blocks)]


def _projections(mlp: BlockedMLP, copies: list[jax.Array], weights: Weights) -> list[jax.Array]:
    """Return gate and up, or up, each of its own copy of the input, so that it has a gradient."""
    with jax.named_scope("+".join(mlp.names)):
        products = [
            dot("bse,em->bsm", x, weights[name]) for x, name in zip(copies, mlp.names, strict=True)
        ]
    return [
        constrain(_add_bias(product, weights.get(f"{name}_bias")), "batch", "seq", mlp.width)
        for name, product in zip(mlp.names, products, strict=True)
    ]


def _activated(mlp: BlockedMLP, wide: list[jax.Array]) -> jax.Array:
    return constrain(apply_activation(mlp.activate, wide), "batch", "seq", mlp.width)


@jax.named_scope("down")
def _down(hidden: jax.Array, weights: jax.Array) -> jax.Array:
    return dot("bsm,me->bse", hidden, weights)


def _add_bias(product: jax.Array, bias: jax.Array | None) -> jax.Array:
    return product if bias is None else product + bias.astype(product.dtype)


def _forward(
    mlp: BlockedMLP, x: jax.Array, weights: Weights
) -> tuple[jax.Array, tuple[jax.Array, Weights]]:
    return mlp_in_blocks(mlp, x, weights), (x, weights)


def _backward(
    mlp: BlockedMLP, saved: tuple[jax.Array, Weights], gradient: jax.Array
) -> tuple[jax.Array, Weights]:
    # XLA for TPUs generates code for each block's kernels, which takes minutes; a loop's only once.
    return (_loop_backward if on_tpu() else _unrolled_backward)(mlp, *saved, gradient)


def _unrolled_backward(
    mlp: BlockedMLP, x: jax.Array, weights: Weights, gradient: jax.Array
) -> tuple[jax.Array, Weights]:
    total, of_blocks = jnp.zeros_like(x), []
    reduced: Weights = {}
    for block in _split(mlp, weights, mlp.blocks):
        into = {name: w for name, w in block.items() if name != "down"}
        wide, of_projections = jax.vjp(partial(_projections, mlp), [x] * len(mlp.names), into)
        # A block's gradients begin when those of the block before are reduced, which takes place
        # beside the products above. Behind the barrier XLA does not compute the values and their
        # gradient as one, which would take six arrays of hidden values instead of four.
        hidden, wide, gradient, reduced = jax.lax.optimization_barrier(
            (_activated(mlp, wide), wide, gradient, reduced)
        )
        of_blocks.append(reduced)
        _, of_down = jax.vjp(partial(_down, hidden), block["down"])
        _, of_wide = jax.vjp(lambda wide, w: _down(_activated(mlp, wide), w), wide, block["down"])
        of_copies, of_into = of_projections(of_wide(gradient)[0])
        reduced = _reduced(mlp, {**of_into, "down": of_down(gradient)[0]})
        for of_copy in of_copies:  # product + sum, in this order: XLA multiplies onto the sum
            total = of_copy + total
        x, total = jax.lax.optimization_barrier((x, total))
    # What comes before the MLP begins when the last block is reduced.
    total, reduced = jax.lax.optimization_barrier((total, reduced))
    of_blocks = [*of_blocks[1:], reduced]
    return total, {
        name: jnp.concatenate([of[name] for of in of_blocks], mlp.columns(name)) for name in weights
    }


def _loop_backward(
    mlp: BlockedMLP, x: jax.Array, weights: Weights, gradient: jax.Array
) -> tuple[jax.Array, Weights]:
    def add_block(carry: tuple[jax.Array, Weights], index: jax.Array) -> tuple[Any, None]:
        total, gradients = carry
        starts = {
            name: index * (w.shape[mlp.columns(name)] // mlp.blocks) for name, w in weights.items()
        }
        block = {
            name: jax.lax.dynamic_slice_in_dim(
                w, starts[name], w.shape[mlp.columns(name)] // mlp.blocks, mlp.columns(name)
            )
            for name, w in weights.items()
        }
        of_x, of_block = _block_backward(mlp, x, block, gradient)
        written = {
            name: jax.lax.dynamic_update_slice_in_dim(
                gradients[name], of_block[name], starts[name], mlp.columns(name)
            )
            for name in weights
        }
        return (total + of_x, written), None

    zeros = _reduced(mlp, {name: jnp.zeros_like(w) for name, w in weights.items()})
    carry = jnp.zeros_like(x), zeros
    return jax.lax.scan(add_block, carry, jnp.arange(mlp.blocks))[0]


def _block_backward(
    mlp: BlockedMLP, x: jax.Array, block: Weights, gradient: jax.Array
) -> tuple[jax.Array, Weights]:
    """Return a block's gradients of the input and, reduced, of its weights."""
    _, differentiate = jax.vjp(partial(_output_of, mlp), x, block)
    of_x, of_block = differentiate(gradient)
    return of_x, _reduced(mlp, of_block)


mlp_in_blocks.defvjp(_forward, _backward)


def _reduced(mlp: BlockedMLP, gradients: Weights) -> Weights:
    """Shard a block's gradients as the optimizer state is."""
    specs = {
        name: ArraySpec(gradient.shape, mlp.axes(name)) for name, gradient in gradients.items()
    }
    return constrain_tree({**gradients}, specs, "optimizer")
