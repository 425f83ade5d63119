"""Products of blocks of rows, each with the matrix of its expert, in a loop over the blocks.

XLA for CPUs multiplies all rows of a ragged product by every expert. The loop multiplies a block by
one matrix, and adds its gradient to that of one matrix, in place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from graphtrain.models.matmul import dot

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int


@jax.custom_vjp
def multiply_blocks(
    rows: Float[Array, "rows inner"],
    weights: Float[Array, "experts inner outer"],
    experts: Int[Array, " blocks"],
) -> Float[Array, "rows outer"]:
    """Multiply each block of rows by the matrix of its expert.

    Args:
        rows: Rows of all blocks, equally many of each.
        weights: Matrix of each expert, in the dtype of the rows.
        experts: Expert of each block.
    """

    def multiply(_: None, block: tuple[Array, Array]) -> tuple[None, Array]:
        of_block, expert = block
        return None, dot("ri,io->ro", of_block, _matrix(weights, expert))

    _, products = jax.lax.scan(multiply, None, (_blocks(rows, experts), experts))
    return products.reshape(len(rows), -1)


def _blocks(rows: Array, experts: Array) -> Array:
    return rows.reshape(len(experts), -1, rows.shape[-1])


def _matrix(weights: Array, expert: Array) -> Array:
    return jax.lax.dynamic_index_in_dim(weights, expert, keepdims=False)


def _forward(
    rows: Array, weights: Array, experts: Array
) -> tuple[Array, tuple[Array, Array, Array]]:
    return multiply_blocks(rows, weights, experts), (rows, weights, experts)


def _backward(saved: tuple[Array, Array, Array], gradient: Array) -> tuple[Array, Array, None]:
    rows, weights, experts = saved

    def add(of_weights: Array, block: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        of_block, of_products, expert = block
        added = dot("ri,ro->io", of_block, of_products, jnp.float32)
        total = _matrix(of_weights, expert) + added
        of_weights = jax.lax.dynamic_update_index_in_dim(of_weights, total, expert, 0)
        return of_weights, dot("ro,io->ri", of_products, _matrix(weights, expert))

    blocks = _blocks(rows, experts), _blocks(gradient, experts), experts
    zeros = jnp.zeros(weights.shape, jnp.float32)
    of_weights, of_rows = jax.lax.scan(add, zeros, blocks)
    return of_rows.reshape(rows.shape), of_weights.astype(weights.dtype), None


multiply_blocks.defvjp(_forward, _backward)
