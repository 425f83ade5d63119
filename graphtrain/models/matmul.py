"""Matrix product of all models: bfloat16 operands, float32 sums, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from lowering.tracing import source_lines
from lowering.tracing.current_target import traced_target

source_lines.report_callers(__file__)


def dot(equation: str, a: jax.Array, b: jax.Array, dtype: DTypeLike | None = None) -> jax.Array:
    """Return the einsum of two arrays, in bfloat16 if either is, with float32 sums.

    The result has the dtype of the computation unless `dtype` is given. Gradients are computed in
    the same way and have the dtype of their operand, so that the gradient of a float32 weight is
    not rounded.

    XLA:CPU uses matrix units only for bfloat16 x bfloat16 -> float32, and JAX's own gradient of
    that product is float32 x bfloat16; hence the custom gradient. GPUs and TPUs sum in float32
    whatever the dtype of the result, so there the result is requested in bfloat16: partial sums
    that devices then reduce are half as many bytes.

    Args:
        equation: Einsum equation; every letter is in at least two of the three arrays.
        a: First operand, float32 or bfloat16.
        b: Second operand, float32 or bfloat16.
        dtype: Dtype of the result; float32 keeps the sums unrounded.
    """
    return _dot(equation, a, b, dtype or _computed_in(a, b))


def dot_many(equation: str, a: jax.Array, others: Sequence[jax.Array]) -> list[jax.Array]:
    """Multiply one array by each of several others, and reduce its gradient once.

    The products' gradients of `a` are summed on each device before devices reduce them. Where the
    other arrays are sharded by columns, so that every gradient of `a` is a partial sum, this needs
    one reduction instead of one for each product.
    """
    return _dots(equation, a, tuple(others))


def _product(equation: str, a: jax.Array, b: jax.Array, dtype: DTypeLike) -> jax.Array:
    compute_dtype = _computed_in(a, b)
    # Without HIGHEST, TPUs and GPUs would round float32 operands to fewer bits.
    precision = jax.lax.Precision.HIGHEST if compute_dtype == jnp.float32 else None
    a, b = a.astype(compute_dtype), b.astype(compute_dtype)
    accumulation_dtype = compute_dtype if dtype == compute_dtype and _rounds_sums() else jnp.float32
    sums = jnp.einsum(
        equation, a, b, precision=precision, preferred_element_type=accumulation_dtype
    )
    return sums.astype(dtype)


def _rounds_sums() -> bool:
    """Return whether the target always sums in float32; False if no target is known."""
    target = traced_target()
    return target is not None and target.platform in ("cuda", "rocm", "tpu")


def _computed_in(a: jax.Array, b: jax.Array) -> DTypeLike:
    return jnp.bfloat16 if jnp.bfloat16 in (a.dtype, b.dtype) else jnp.float32


def _forward(
    equation: str, a: jax.Array, b: jax.Array, dtype: DTypeLike
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _product(equation, a, b, dtype), (a, b)


def _backward(
    equation: str,
    dtype: DTypeLike,
    operands: tuple[jax.Array, jax.Array],
    gradient: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    a, b = operands
    gradient = gradient.astype(_computed_in(a, b))
    inputs, out = equation.split("->")
    a_axes, b_axes = inputs.split(",")
    return (
        _product(f"{out},{b_axes}->{a_axes}", gradient, b, a.dtype),
        _product(f"{a_axes},{out}->{b_axes}", a, gradient, b.dtype),
    )


_dot = jax.custom_vjp(_product, nondiff_argnums=(0, 3))
_dot.defvjp(_forward, _backward)


def _products(equation: str, a: jax.Array, factors: tuple[jax.Array, ...]) -> list[jax.Array]:
    return [_product(equation, a, b, _computed_in(a, b)) for b in factors]


def _products_forward(
    equation: str, a: jax.Array, factors: tuple[jax.Array, ...]
) -> tuple[list[jax.Array], tuple[jax.Array, tuple[jax.Array, ...]]]:
    return _products(equation, a, factors), (a, factors)


def _products_backward(
    equation: str,
    operands: tuple[jax.Array, tuple[jax.Array, ...]],
    gradients: list[jax.Array],
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    a, factors = operands
    inputs, out = equation.split("->")
    a_axes, b_axes = inputs.split(",")
    pairs = [
        (gradient.astype(_computed_in(a, b)), b)
        for gradient, b in zip(gradients, factors, strict=True)
    ]
    accumulation_dtype = a.dtype if _rounds_sums() else jnp.float32
    grad_a = sum(
        _product(f"{out},{b_axes}->{a_axes}", gradient, b, accumulation_dtype)
        for gradient, b in pairs
    )
    grad_factors = tuple(
        _product(f"{a_axes},{out}->{b_axes}", a, gradient, b.dtype) for gradient, b in pairs
    )
    return jnp.asarray(grad_a).astype(a.dtype), grad_factors


_dots = jax.custom_vjp(_products, nondiff_argnums=(0,))
_dots.defvjp(_products_forward, _products_backward)
