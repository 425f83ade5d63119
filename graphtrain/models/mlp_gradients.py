"""Products of an MLP whose gradients of weights are computed before what is in front of the MLP.

Nothing reads the gradients of weights before the optimizer, so XLA computes them during the
backward pass of attention, and until then the MLP's hidden values exist, and their gradients. Here
the gradient of a product's input waits for those of its weights, behind a barrier.

The barrier is in front of the reduction over devices, which still runs beside what follows: shards
of the tokens are dimensions of the products, summed behind it. So products and collectives are
those of JAX's gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import partial
from typing import Any

import jax

from graphtrain.models.matmul import dot, dot_many
from graphtrain.models.token_shards import by_token_shard, sum_token_shards
from lowering.tracing.context import set_context_variable

_is_first: ContextVar[bool] = ContextVar("mlp_weights_first", default=False)


def use_mlp_weights_first(first: bool) -> AbstractContextManager[Any]:
    """Order the gradients of the MLPs that are traced inside, or not.

    `mlp_support.computes_weights_first` decides it for a program.
    """
    return set_context_variable(_is_first, first)


def are_mlp_weights_first() -> bool:
    """Return whether the MLPs that are being traced compute the gradients of weights first."""
    return _is_first.get()


def multiply_weights_first(
    width: str, equation: str, x: jax.Array, weights: Sequence[jax.Array]
) -> list[jax.Array]:
    """Multiply x by each matrix, as dot_many; the gradients of the matrices are computed first.

    Args:
        width: Array axis of hidden values, m in the equation.
        equation: Einsum equation of x, "bse" or "bsm", and a matrix.
        x: Input of the products.
        weights: Matrices.
    """
    products: Any = _products(width, equation, x, tuple(weights))
    return products


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _products(
    width: str, equation: str, x: jax.Array, weights: tuple[jax.Array, ...]
) -> list[jax.Array]:
    return dot_many(equation, x, weights)


def _forward(
    width: str, equation: str, x: jax.Array, weights: tuple[jax.Array, ...]
) -> tuple[list[jax.Array], tuple[jax.Array, tuple[jax.Array, ...]]]:
    return _products(width, equation, x, weights), (x, weights)


def _backward(
    width: str,
    equation: str,
    saved: tuple[jax.Array, tuple[jax.Array, ...]],
    gradients: list[jax.Array],
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    x, weights = saved
    inputs, out = equation.split("->")
    of_x, of_weights = inputs.split(",")
    axes = {"e": "embed", "m": width}
    x_by_shard = by_token_shard(x, axes[of_x[-1]])
    by_shard = [by_token_shard(gradient, axes[out[-1]]) for gradient in gradients]
    local = f"nbcs{of_x[-1]},nbcs{out[-1]}->nc{of_weights}"
    partial_sums = [
        dot(local, x_by_shard, gradient, weight.dtype)
        for gradient, weight in zip(by_shard, weights, strict=True)
    ]
    grad_x: Any = sum(
        dot(f"{out},{of_weights}->{of_x}", gradient, weight)
        for gradient, weight in zip(gradients, weights, strict=True)
    )
    grad_x, partial_sums = jax.lax.optimization_barrier((grad_x, partial_sums))
    matrix = axes[of_weights[0]], axes[of_weights[1]]
    return grad_x, tuple(sum_token_shards(sums, matrix, "mlp") for sums in partial_sums)


_products.defvjp(_forward, _backward)
