"""Matrix products in fp8 or int8, forward and backward, through qwix's operations.

Operands are quantized anew for each product, by their largest absolute value: activations, weights
and gradients keep their own dtype between products. The gradient of a quantized operand is that of
the operand itself (straight-through estimator).

Source: Micikevicius et al. 2022, "FP8 formats for deep learning", section 3,
https://arxiv.org/abs/2209.05433: e4m3 for weights and activations, e5m2 for gradients.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from graphtrain.config.schema import Precision
from graphtrain.config.schema.precision import Recipe
from graphtrain.models.int8_weight import Int8Weight
from graphtrain.models.matmul import Multiply, dot, product_gradients
from lowering.hlo.quantized_products import SCOPE
from lowering.machine.extras import optional_import
from lowering.tracing import source_lines
from lowering.tracing.context import set_context_variable

source_lines.report_callers(__file__)

# Dtypes of weights and activations, and of gradients.
_DTYPES: dict[str, tuple[DTypeLike, DTypeLike]] = {
    "fp8": (jnp.float8_e4m3fn, jnp.float8_e5m2),
    "int8": (jnp.int8, jnp.int8),
}
BLOCK = 128  # summed values with one scale; of fewer, qwix would multiply dequantized ones

_current: ContextVar[Precision | None] = ContextVar("precision", default=None)


def quantize_products(precision: Precision) -> AbstractContextManager[Any]:
    """Quantize the products with weights that are traced inside, as the settings say."""
    return set_context_variable(_current, precision)


def quantization_of(*names: str) -> Precision | None:
    """Return how a product is quantized; None if it is not.

    Args:
        names: Its parameter, and the part of the model that it belongs to.
    """
    current = _current.get()
    if current is None or current.matmul_dtype is None or {*names}.intersection(current.excluded):
        return None
    return current


def parameter_dot(
    names: tuple[str, ...],
    equation: str,
    x: jax.Array,
    weights: jax.Array | Int8Weight,
    dtype: DTypeLike | None = None,
) -> jax.Array:
    """Return `dot` of activations and weights; in fp8 or int8 if the settings say so.

    Args:
        names: Those of `quantization_of`.
        equation: Einsum equation.
        x: Activations.
        weights: Weights; of int8 only while a model is served.
        dtype: Dtype of the result; None: that of the computation.
    """
    precision = quantization_of(*names)
    if precision is None or isinstance(weights, Int8Weight):
        return dot(equation, x, weights, dtype)
    with jax.named_scope(names[0]):
        return quantized_dot(precision, equation, x, weights, dtype or x.dtype)


def gradient_dot(name: str, gradient: jax.Array) -> Multiply:
    """Return how `gradient` is multiplied, where a loop computes gradients in the forward pass."""
    if (precision := quantization_of(name)) is None:
        return dot

    def multiply(equation: str, a: jax.Array, b: jax.Array, dtype: DTypeLike) -> jax.Array:
        with jax.named_scope(name):
            return _product(precision, equation, a, b, dtype, gradient)

    return multiply


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 4))
def quantized_dot(
    precision: Precision, equation: str, x: jax.Array, weights: jax.Array, dtype: DTypeLike
) -> jax.Array:
    """Return the einsum of activations and weights, both quantized, in a dtype."""
    return _product(precision, equation, x, weights, dtype)


def _forward(
    precision: Precision, equation: str, x: jax.Array, weights: jax.Array, dtype: DTypeLike
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return quantized_dot(precision, equation, x, weights, dtype), (x, weights)


def _backward(
    precision: Precision,
    equation: str,
    dtype: DTypeLike,
    operands: tuple[jax.Array, jax.Array],
    gradient: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    del dtype
    multiply = partial(_product, precision, gradient=gradient)
    return product_gradients(multiply, equation, *operands, gradient)


quantized_dot.defvjp(_forward, _backward)


def _product(
    precision: Precision,
    equation: str,
    first: jax.Array,
    second: jax.Array,
    dtype: DTypeLike,
    gradient: jax.Array | None = None,
) -> jax.Array:
    """Return the einsum of two arrays, both quantized, with the sums in float32.

    Args:
        precision: Settings.
        equation: Einsum equation.
        first: First operand.
        second: Second operand.
        dtype: Dtype of the result.
        gradient: The operand that is a gradient, if one is.
    """
    with optional_import(f'program.precision.compute = "{precision.compute}"'):
        import qwix

    of_values, of_gradients = _DTYPES[precision.matmul_dtype or ""]
    inputs, out = equation.split("->")
    quantized = [
        qwix.quantize(
            array,
            of_gradients if array is gradient else of_values,
            scale_dtype=jnp.float32,
            **_scales(precision.recipe_or_default, letters, out, array.shape),
        )
        for array, letters in zip((first, second), inputs.split(","), strict=True)
    ]
    with jax.named_scope(SCOPE):
        return qwix.einsum(equation, *quantized, preferred_element_type=jnp.float32).astype(dtype)


def _scales(
    recipe: Recipe | None, letters: str, out: str, shape: tuple[int, ...]
) -> dict[str, Any]:
    """Return which elements of an operand share a scale, as arguments of qwix.quantize."""
    if recipe == "tensor":
        return {}
    channels = [axis for axis, letter in enumerate(letters) if letter in out]
    if recipe == "channel":
        return {"channelwise_axes": channels}
    last = max(axis for axis, letter in enumerate(letters) if letter not in out)
    blocks = {} if shape[last] % BLOCK else {last: BLOCK}
    return {"channelwise_axes": channels, "tiled_axes": blocks}
