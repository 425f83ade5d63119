"""Matrix product of all models: operands of 16 bits, float32 sums, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from graphtrain.models.int8_weight import Int8Weight, quantize_int8
from graphtrain.models.matmul_support import converts_weights
from lowering.tracing import source_lines
from lowering.tracing.context import set_context_variable
from lowering.tracing.cpu_hints import materialize
from lowering.tracing.current_target import traced_target
from lowering.tracing.tpu_hints import cast_where_used

source_lines.report_callers(__file__)

# (einsum equation, first operand, second operand, dtype of the result) -> result
Multiply = Callable[[str, jax.Array, jax.Array, DTypeLike], jax.Array]


def dot(
    equation: str, a: jax.Array, b: jax.Array | Int8Weight, dtype: DTypeLike | None = None
) -> jax.Array:
    """Return the einsum of two arrays, in 16 bits if either has them, with float32 sums.

    The result has the dtype of the computation unless `dtype` is given. Gradients are computed in
    the same way and have the dtype of their operand, so that the gradient of a float32 weight is
    not rounded.

    XLA:CPU uses matrix units only for bfloat16 x bfloat16 -> float32, and JAX's own gradient of
    that product is float32 x bfloat16; hence the custom gradient. GPUs and TPUs sum in float32
    whatever the dtype of the result, so there the result is requested in bfloat16: partial sums
    that devices then reduce are half as many bytes.

    Args:
        equation: Einsum equation; every letter is in at least two of the three arrays.
        a: First operand, float32, bfloat16 or float16.
        b: Second operand, of the same dtypes, or weights of int8.
        dtype: Dtype of the result; float32 keeps the sums unrounded.
    """
    if isinstance(b, Int8Weight):
        multiply = partial(_few_rows_int8, b) if _few_rows.get() else b.multiply
        return multiply(equation, a, dtype or a.dtype)
    result_dtype = dtype or _computed_in(a, b)
    if _few_rows.get() and _is_product_with_weights(equation):
        return _few_rows_product(equation, a, b, dtype or a.dtype)
    return _dot(equation, a, b, result_dtype)


def dot_many(
    equation: str, a: jax.Array, others: Sequence[jax.Array | Int8Weight]
) -> list[jax.Array]:
    """Multiply one array by each of several others, and reduce its gradient once.

    The products' gradients of `a` are summed on each device before devices reduce them. Where the
    other arrays are sharded by columns, so that every gradient of `a` is a partial sum, this needs
    one reduction instead of one for each product.
    """
    arrays = tuple(other for other in others if not isinstance(other, Int8Weight))
    if _few_rows.get() or len(arrays) < len(others):
        return [dot(equation, a, other) for other in others]
    return _dots(equation, a, arrays)


def _product(equation: str, a: jax.Array, b: jax.Array, dtype: DTypeLike) -> jax.Array:
    compute_dtype = _computed_in(a, b)
    # Without HIGHEST, TPUs and GPUs would round float32 operands to fewer bits.
    precision = jax.lax.Precision.HIGHEST if compute_dtype == jnp.float32 else None
    a, b = cast_where_used(a, compute_dtype), cast_where_used(b, compute_dtype)
    accumulation_dtype = compute_dtype if dtype == compute_dtype and _rounds_sums() else jnp.float32
    sums = jnp.einsum(
        equation, a, b, precision=precision, preferred_element_type=accumulation_dtype
    )
    return sums.astype(dtype)


def few_rows() -> AbstractContextManager[Any]:
    """Compute products of few activations with weights as XLA:CPU is fastest, in the code inside.

    Weights lie in memory with the summed axes last. For 1 and for 8 rows, 48 products with float32
    weights of 768 x 2048 take 7.4 and 11.7 ms on two cores, with bfloat16 weights 6.1 and 8.0 ms.
    """
    return set_context_variable(_few_rows, True)


_few_rows: ContextVar[bool] = ContextVar("few_rows", default=False)


def _is_product_with_weights(equation: str) -> bool:
    """Return whether no axis is in both operands and the result, as in products of attention."""
    inputs, output = equation.split("->")
    first, second = inputs.split(",")
    return not set(first) & set(second) & set(output)


def _few_rows_product(
    equation: str, x: jax.Array, weights: jax.Array, dtype: DTypeLike
) -> jax.Array:
    of_x, of_weights, summed, rows, columns, output = _letters(equation)
    # Operands are stored in this order, or else XLA multiplies by a transposed array.
    if weights.dtype == jnp.bfloat16:
        x = jnp.einsum(f"{of_x}->{rows}{summed}", x)
        weights = jnp.einsum(f"{of_weights}->{columns}{summed}", weights)
        if converts_weights(math.prod(x.shape[: len(rows)])):
            # The values of bfloat16, so that a result does not depend on the number of rows.
            x = jax.lax.reduce_precision(x.astype(jnp.float32), 8, 7)
            # After x: otherwise XLA converts the weights of all layers first.
            x, weights = materialize((x, weights))
            weights = weights.astype(jnp.float32)
        else:
            x = materialize(x.astype(jnp.bfloat16))
        shape = x.shape[: len(rows)], weights.shape[: len(columns)]
        return jnp.einsum(f"{rows}{columns}->{output}", _multiply_rows(x, weights, *shape, dtype))
    # XLA:CPU copies the second operand of a product into blocks.
    x = materialize(jnp.einsum(f"{of_x}->{summed}{rows}", x))
    product = _product(f"{of_weights},{summed}{rows}->{columns}{rows}", weights, x, dtype)
    return jnp.einsum(f"{columns}{rows}->{output}", product)


def _few_rows_int8(weights: Int8Weight, equation: str, x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Multiply by int8 weights as integers: each row of x is quantized, too, by its largest."""
    of_x, of_weights, summed, rows, columns, output = _letters(equation)
    x = materialize(jnp.einsum(f"{of_x}->{rows}{summed}", x.astype(jnp.float32)))
    axes = tuple(range(len(rows), x.ndim))
    codes, scales = materialize(quantize_int8(x, axes))
    matrix = jnp.einsum(f"{of_weights}->{columns}{summed}", weights.codes)
    shape = x.shape[: len(rows)], matrix.shape[: len(columns)]
    sums = _multiply_rows(codes, matrix, *shape, jnp.int32).astype(jnp.float32)
    return jnp.einsum(
        f"{rows}{columns},{rows},{columns}->{output}", sums, scales, weights.scales
    ).astype(dtype)


def _letters(equation: str) -> tuple[str, str, str, str, str, str]:
    """Return the axes of x and of weights, those that are summed, rows, columns, and the output."""
    inputs, output = equation.split("->")
    of_x, of_weights = inputs.split(",")
    summed = "".join(axis for axis in of_weights if axis in of_x)
    rows = "".join(axis for axis in of_x if axis not in summed)
    columns = "".join(axis for axis in of_weights if axis not in summed)
    return of_x, of_weights, summed, rows, columns, output


def _multiply_rows(
    x: jax.Array,
    weights: jax.Array,
    rows: tuple[int, ...],
    columns: tuple[int, ...],
    dtype: DTypeLike,
) -> jax.Array:
    """Multiply x (*rows, *summed) by weights (*columns, *summed).

    Both become matrices: XLA:CPU transposes weights of a product of more dimensions.
    """
    count, width = math.prod(rows), math.prod(columns)
    x, weights = x.reshape(count, -1), weights.reshape(width, -1)
    if count == 1:  # XLA:CPU has no fast product of one row
        x = jnp.concatenate([x, x])
    if dtype == jnp.int32:
        product = jnp.einsum("rs,cs->rc", x, weights, preferred_element_type=dtype)
    else:
        product = _product("rs,cs->rc", x, weights, dtype)
    return product[:count].reshape(*rows, *columns)


def _rounds_sums() -> bool:
    """Return whether the target always sums in float32; False if no target is known."""
    target = traced_target()
    return target is not None and target.platform in ("cuda", "rocm", "tpu")


def _computed_in(a: jax.Array, b: jax.Array) -> DTypeLike:
    """Return the narrower dtype of two operands; no product has one of each 16-bit dtype."""
    for dtype in (jnp.bfloat16, jnp.float16):
        if dtype in (a.dtype, b.dtype):
            return dtype
    return jnp.float32


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
    return product_gradients(_product, equation, a, b, gradient.astype(_computed_in(a, b)))


def product_gradients(
    multiply: Multiply, equation: str, a: jax.Array, b: jax.Array, gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of both operands of an einsum, each a product in its operand's dtype.

    Args:
        multiply: Computes a product.
        equation: Einsum equation of the operands.
        a: First operand.
        b: Second operand.
        gradient: Gradient of the result.
    """
    inputs, out = equation.split("->")
    a_axes, b_axes = inputs.split(",")
    return (
        multiply(f"{out},{b_axes}->{a_axes}", gradient, b, a.dtype),
        multiply(f"{a_axes},{out}->{b_axes}", a, gradient, b.dtype),
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
