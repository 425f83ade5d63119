"""MLP whose backward pass runs in blocks of hidden columns.

The backward pass of an MLP has about seven arrays of hidden values (batch, seq, mlp) at once, and
the gathered weights and unreduced gradients of three matrices. In blocks of columns it has four
arrays, weights and gradients of one block: the block's hidden values are computed again from the
MLP's input, and its gradients of weights are complete, and reduced, before those of the next block.
No product is computed twice if the layer is recomputed from its input anyway, and nothing there
reads the MLP's output. No weight is gathered twice. The gradient of the input is summed over the
blocks, in the input's dtype. The forward pass is in fewer blocks, over which it sums the output.

Where tensor parallelism shards the columns, blocks are of each device's columns. The gradient of
the input is summed over them before devices reduce it, once.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from graphtrain.models.blocked_mlp import BlockedMLP, Weights
from graphtrain.models.mlp_block_count import forward_block_count
from lowering.tracing.context import set_context_variable
from lowering.tracing.tpu_hints import on_tpu

_count: ContextVar[int] = ContextVar("mlp_blocks", default=1)


def use_mlp_blocks(count: int) -> AbstractContextManager[Any]:
    """Differentiate the MLPs that are traced inside in so many blocks of hidden columns."""
    return set_context_variable(_count, count)


def current_mlp_blocks() -> int:
    """Return the number of blocks of the MLPs that are being traced; 1 without use_mlp_blocks."""
    return _count.get()


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def mlp_in_blocks(mlp: BlockedMLP, x: jax.Array, weights: Weights) -> jax.Array:
    """Return the MLP's output (batch, seq, embed) without the bias of its last product.

    Args:
        mlp: Settings.
        x: Input (batch, seq, embed).
        weights: gate and up (embed, mlp), down (mlp, embed), and biases (mlp).
    """
    count = forward_block_count(mlp.blocks, on_tpu=on_tpu())
    if count == 1:  # nothing is summed over blocks, so that the partitioner may sum over shards
        return _output_of(replace(mlp, shards=1), x, weights)
    x, blocks = mlp.to_shards(x), mlp.split(mlp.split_shards(weights), count)
    total = _output_of(mlp, x, blocks[0])
    for index in range(1, count):
        # This block begins when the one before is done, and weights of the next are gathered then.
        x, total, blocks[index + 1 :] = jax.lax.optimization_barrier(
            (x, total, blocks[index + 1 :])
        )
        total = _output_of(mlp, x, blocks[index]) + total  # in this order: XLA adds in the product
    return mlp.sum_shards(total)


def _output_of(mlp: BlockedMLP, x: jax.Array, block: Weights) -> jax.Array:
    """Return a block's part of the output."""
    wide = _projections(mlp, block, [x] * len(mlp.names))
    return mlp.down(mlp.activated(wide), block["down"])


def _projections(mlp: BlockedMLP, weights: Weights, copies: list[jax.Array]) -> list[jax.Array]:
    """Return gate and up, or up, each of its own copy of the input, so that it has a gradient."""
    with jax.named_scope("+".join(mlp.names)):
        return [mlp.widen(name, x, weights) for name, x in zip(mlp.names, copies, strict=True)]


def _forward(
    mlp: BlockedMLP, x: jax.Array, weights: Weights
) -> tuple[jax.Array, tuple[jax.Array, Weights]]:
    return mlp_in_blocks(mlp, x, weights), (x, weights)


def _backward(
    mlp: BlockedMLP, saved: tuple[jax.Array, Weights], gradient: jax.Array
) -> tuple[jax.Array, Weights]:
    # XLA for TPUs generates code for each block's kernels, which takes minutes; a loop's only once.
    backward = _loop_backward if on_tpu() else _unrolled_backward
    x, weights = saved
    arrays = mlp.to_shards(x), mlp.split_shards(weights), mlp.to_shards(gradient)
    of_x, of_weights = backward(mlp, *arrays)
    return mlp.sum_shards(of_x), mlp.merge_shards(of_weights)


def _unrolled_backward(
    mlp: BlockedMLP, x: jax.Array, weights: Weights, gradient: jax.Array
) -> tuple[jax.Array, Weights]:
    total, of_blocks = jnp.zeros_like(x), []
    reduced: Weights = {}
    for block in mlp.split(weights, mlp.blocks):
        gathered = mlp.gathered(block, x.dtype)
        wide, of_projections = jax.vjp(partial(_projections, mlp, gathered), [x] * len(mlp.names))
        # A block's gradients begin when those of the block before are reduced, which takes place
        # beside the products above.
        wide, gradient, reduced = jax.lax.optimization_barrier((wide, gradient, reduced))
        # Behind the barrier XLA does not compute the values and their gradient as one, which would
        # take six arrays of hidden values instead of four.
        hidden, wide = jax.lax.optimization_barrier((mlp.activated(wide), wide))
        of_blocks.append(reduced)
        _, of_output = jax.vjp(
            lambda wide, w=gathered["down"]: mlp.down(mlp.activated(wide), w), wide
        )
        of_wide = of_output(gradient)[0]
        for of_copy in of_projections(of_wide)[0]:
            total = of_copy + total  # product + sum, in this order: XLA multiplies onto the sum
        # After these products nothing reads the block's gathered weights.
        x, of_wide, hidden, gradient, total = jax.lax.optimization_barrier(
            (x, of_wide, hidden, gradient, total)
        )
        reduced = _reduced_gradients(mlp, block, x, of_wide, hidden, gradient)
    # What comes before the MLP begins when the last block is reduced.
    total, reduced = jax.lax.optimization_barrier((total, reduced))
    of_blocks = [*of_blocks[1:], reduced]
    return total, {
        name: jnp.concatenate([of[name] for of in of_blocks], mlp.columns(name)) for name in weights
    }


def _reduced_gradients(
    mlp: BlockedMLP,
    block: Weights,
    x: jax.Array,
    of_wide: list[jax.Array],
    hidden: jax.Array,
    gradient: jax.Array,
) -> Weights:
    """Return the reduced gradients of a block's weights.

    Args:
        mlp: Settings.
        block: Weights, as they are stored.
        x: Stream that gate and up multiplied.
        of_wide: Gradients of gate and up.
        hidden: Values that down multiplied.
        gradient: Gradient of the output.
    """
    gradients = {"down": mlp.weight_gradient("down", hidden, gradient, block["down"].dtype)}
    for name, of_values in zip(mlp.names, of_wide, strict=True):
        gradients[name] = mlp.weight_gradient(name, x, of_values, block[name].dtype)
        if (bias := f"{name}_bias") in block:
            summed = (0, 1) if mlp.shards == 1 else (1, 2)
            gradients[bias] = of_values.sum(summed, dtype=block[bias].dtype)
    return mlp.reduced(gradients)


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

    zeros = mlp.reduced({name: jnp.zeros_like(w) for name, w in weights.items()})
    carry = jnp.zeros_like(x), zeros
    return jax.lax.scan(add_block, carry, jnp.arange(mlp.blocks))[0]


def _block_backward(
    mlp: BlockedMLP, x: jax.Array, block: Weights, gradient: jax.Array
) -> tuple[jax.Array, Weights]:
    """Return a block's gradients of the input and, reduced, of its weights."""
    gathered = mlp.gathered(block, x.dtype)

    def widen(x: jax.Array) -> list[jax.Array]:
        return _projections(mlp, gathered, [x] * len(mlp.names))

    wide, of_projections = jax.vjp(widen, x)
    hidden, of_activation = jax.vjp(mlp.activated, wide)
    _, of_down = jax.vjp(lambda hidden: mlp.down(hidden, gathered["down"]), hidden)
    of_wide = of_activation(of_down(gradient)[0])[0]
    of_x = of_projections(of_wide)[0]
    return of_x, _reduced_gradients(mlp, block, x, of_wide, hidden, gradient)


mlp_in_blocks.defvjp(_forward, _backward)
