"""Grouped matrix product for NVIDIA GPUs: each block of rows times the matrix of its expert.

XLA for GPUs expands a ragged product into a dense one: all rows times the matrices of all experts
(jaxlib 0.10.2). The Triton kernels here multiply each row by one matrix only. Rows are arranged so
that each expert's begin at a multiple of BLOCK rows; the rest of its last block is zeros.

Source: Gale et al. 2022, "MegaBlocks", https://arxiv.org/abs/2211.15841
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from graphtrain.models.grouped_matmul_support import BLOCK, MULTIPLE

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float

_TILES = (128, 64, 32, MULTIPLE)  # columns that one kernel instance computes; the largest that fits
_MAX_DEPTH = 64  # elements of the contracted dimension in one iteration; not tuned


class RowBlocks(NamedTuple):
    """Arrangement of rows in blocks, each of one expert."""

    experts: Array  # expert of each block; unused blocks come last
    ends: Array  # number of blocks of each expert and all experts before it
    slots: Array  # row of each choice; the number of rows if its expert is on another device
    rows: int  # number of rows, including padding


def arrange(experts: Array, count: int, block: int = BLOCK) -> RowBlocks:
    """Arrange choices in blocks by expert.

    Args:
        experts: Expert of each choice (choices); `count` if the expert is on another device.
        count: Number of experts on this device.
        block: Rows of a block.
    """
    chosen = experts[:, None] == jnp.arange(count)
    order = jnp.argsort(experts, stable=True)
    sizes = chosen.sum(0, dtype=jnp.int32)
    ends = jnp.cumsum(-(-sizes // block))
    blocks = -(-len(experts) // block) + count
    rows = blocks * block
    # Rank of each choice among those of its expert: its place in sorted order, minus where the
    # expert's choices begin there.
    ranks = jnp.zeros_like(experts).at[order].set(jnp.arange(len(experts), dtype=experts.dtype))
    begins = jnp.cumsum(sizes) - sizes
    starts = jnp.concatenate([jnp.zeros(1, ends.dtype), ends[:-1]]) * block
    local = jnp.minimum(experts, count - 1)
    slots = jnp.where(experts < count, ranks - begins[local] + starts[local], rows)
    of_blocks = jnp.searchsorted(ends, jnp.arange(blocks), side="right")
    return RowBlocks(jnp.minimum(of_blocks, count - 1).astype(jnp.int32), ends, slots, rows)


def grouped_matmul(
    rows: Float[Array, "rows inner"],
    weights: Float[Array, "experts inner outer"],
    blocks: RowBlocks,
    expected_rows: int,
    interpret: bool = False,
) -> Float[Array, "rows outer"]:
    """Multiply each block of rows by its expert's matrix; sums are float32.

    Args:
        rows: Rows as `arrange` places them.
        weights: Matrix of each expert, in the dtype of the rows.
        blocks: Arrangement of the rows.
        expected_rows: Number of rows expected in used blocks, for the estimate of FLOPs.
        interpret: Run the kernel without a GPU, for tests.
    """
    return _product(expected_rows, interpret, rows, weights, blocks.experts, blocks.ends)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(
    expected: int,
    interpret: bool,
    rows: jax.Array,
    weights: jax.Array,
    experts: jax.Array,
    ends: jax.Array,
) -> jax.Array:
    return _times_matrices(rows, weights, experts, ends, expected, interpret, transposed=False)


def _forward(
    expected: int, interpret: bool, *arrays: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _product(expected, interpret, *arrays), arrays


def _backward(
    expected: int, interpret: bool, saved: tuple[jax.Array, ...], gradient: jax.Array
) -> tuple[jax.Array | None, ...]:
    rows, weights, experts, ends = saved
    of_rows = _times_matrices(gradient, weights, experts, ends, expected, interpret, True)
    of_weights = _gradient_of_matrices(rows, gradient, ends, expected, interpret)
    return of_rows, of_weights, None, None


_product.defvjp(_forward, _backward)


def _times_matrices(
    rows: jax.Array,
    weights: jax.Array,
    experts: jax.Array,
    ends: jax.Array,
    expected: int,
    interpret: bool,
    transposed: bool,
) -> jax.Array:
    """Multiply each block by its expert's matrix, or by its transpose."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    inner, outer = rows.shape[1], weights.shape[1 if transposed else 2]
    depth, tile = _tile(inner, _MAX_DEPTH), _tile(outer)
    precision = _precision(rows)

    def kernel(
        experts_ref: Any, ends_ref: Any, rows_ref: Any, weights_ref: Any,
        out_ref: Any,
    ) -> None:  # fmt: skip
        block, column = pl.program_id(0), pl.program_id(1)
        expert, columns = experts_ref[block], pl.ds(column * tile, tile)

        def add(step: jax.Array, total: jax.Array) -> jax.Array:
            inside = pl.ds(step * depth, depth)
            left = triton.load(rows_ref.at[pl.ds(block * BLOCK, BLOCK), inside])
            if transposed:
                right = triton.load(weights_ref.at[expert, columns, inside])
                return total + triton.dot(left, right, trans_b=True, precision=precision)
            right = triton.load(weights_ref.at[expert, inside, columns])
            return total + triton.dot(left, right, precision=precision)

        # Blocks after the last expert's have nothing to add: their rows are zeros.
        steps = (block < ends_ref[len(weights) - 1]).astype(jnp.int32) * (inner // depth)
        total = jax.lax.fori_loop(0, steps, add, jnp.zeros((BLOCK, tile), jnp.float32))
        out_ref[...] = total.astype(out_ref.dtype)

    call = pl.pallas_call(
        kernel,
        grid=(len(rows) // BLOCK, outer // tile),
        out_specs=pl.BlockSpec((BLOCK, tile), lambda block, column: (block, column)),
        out_shape=jax.ShapeDtypeStruct((len(rows), outer), rows.dtype),
        compiler_params=triton.CompilerParams(num_warps=8, num_stages=3),
        name="grouped_matmul",
        interpret=interpret,
    )
    with _annotated_flops(2 * expected * inner * outer):
        return call(experts, ends, rows, weights)


def _gradient_of_matrices(
    rows: jax.Array, gradient: jax.Array, ends: jax.Array, expected: int, interpret: bool
) -> jax.Array:
    """Return, for each expert, the product of its rows, transposed, with their gradient."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    inner, outer = rows.shape[1], gradient.shape[1]
    height, width = _tile(inner), _tile(outer)
    precision = _precision(rows)

    def kernel(ends_ref: Any, rows_ref: Any, gradient_ref: Any, out_ref: Any) -> None:
        expert = pl.program_id(2)
        lines, columns = (
            pl.ds(pl.program_id(0) * height, height),
            pl.ds(pl.program_id(1) * width, width),
        )

        def add(step: jax.Array, total: jax.Array) -> jax.Array:
            inside = pl.ds(step * _MAX_DEPTH, _MAX_DEPTH)
            left = triton.load(rows_ref.at[inside, lines])
            right = triton.load(gradient_ref.at[inside, columns])
            return total + triton.dot(left, right, trans_a=True, precision=precision)

        steps = BLOCK // _MAX_DEPTH
        begin = ends_ref[jnp.maximum(expert - 1, 0)] * (expert > 0).astype(jnp.int32)
        total = jnp.zeros((height, width), jnp.float32)
        total = jax.lax.fori_loop(begin * steps, ends_ref[expert] * steps, add, total)
        out_ref[...] = total.astype(out_ref.dtype)

    call = pl.pallas_call(
        kernel,
        grid=(inner // height, outer // width, len(ends)),
        out_specs=pl.BlockSpec((None, height, width), lambda line, column, e: (e, line, column)),
        out_shape=jax.ShapeDtypeStruct((len(ends), inner, outer), rows.dtype),
        compiler_params=triton.CompilerParams(num_warps=8, num_stages=3),
        name="grouped_matmul_gradient",
        interpret=interpret,
    )
    with _annotated_flops(2 * expected * inner * outer):
        return call(ends, rows, gradient)


def _tile(size: int, largest: int = _TILES[0]) -> int:
    return next(tile for tile in _TILES if tile <= largest and size % tile == 0)


def _precision(rows: jax.Array) -> jax.lax.Precision | None:
    return jax.lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None


def _annotated_flops(flops: int) -> AbstractContextManager[Any]:
    """Return a scope whose name tells `lowering.hlo.flops` the FLOPs of the kernel inside.

    JAX drops a Pallas kernel's cost estimate where it lowers the kernel for GPUs (jax 0.10.2).
    """
    return jax.named_scope(f"kernel_flops_{flops}")
