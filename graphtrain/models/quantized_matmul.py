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


_current: ContextVar[Precision | None] = ContextVar("precision", default=None)


def quantize_products(precision: Precision) -> AbstractContextManager[Any]:
    """Quantize the products with weights of layers that are traced inside, as the settings say."""
    return set_context_variable(_current, precision)


def quantization_of(name: str) -> Precision | None:
    """Return how products with the parameter `name` are quantized; None if they are not."""
    current = _current.get()
    if current is None or current.matmul_dtype is None or name in (current.exclude or ()):
        return None
    return current


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def quantized_dot(
    precision: Precision, equation: str, x: jax.Array, weights: jax.Array
) -> jax.Array:
    """Return the einsum of activations and weights, both quantized, in the dtype of x."""
    forward, _ = _DTYPES[precision.matmul_dtype or ""]
    return _product(precision, equation, (x, forward), (weights, forward), x.dtype)


def _forward(
    precision: Precision, equation: str, x: jax.Array, weights: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return quantized_dot(precision, equation, x, weights), (x, weights)


def _backward(
    precision: Precision,
    equation: str,
    operands: tuple[jax.Array, jax.Array],
    gradient: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    x, weights = operands
    forward, backward = _DTYPES[precision.matmul_dtype or ""]
    inputs, out = equation.split("->")
    of_x, of_weights = inputs.split(",")
    multiply = partial(_product, precision)
    given = gradient, backward
    return (
        multiply(f"{out},{of_weights}->{of_x}", given, (weights, forward), x.dtype),
        multiply(f"{of_x},{out}->{of_weights}", (x, forward), given, weights.dtype),
    )


quantized_dot.defvjp(_forward, _backward)


def _product(
    precision: Precision,
    equation: str,
    first: tuple[jax.Array, DTypeLike],
    second: tuple[jax.Array, DTypeLike],
    dtype: DTypeLike,
) -> jax.Array:
    """Return the einsum of two arrays, each quantized to a dtype, with the sums in float32."""
    with optional_import("program.precision.matmul_dtype"):
        import qwix

    inputs, out = equation.split("->")
    quantized = [
        qwix.quantize(
            array,
            qtype,
            channelwise_axes=[
                axis
                for axis, letter in enumerate(letters)
                if letter in out and precision.recipe_or_default == "channel"
            ],
            scale_dtype=jnp.float32,
        )
        for (array, qtype), letters in zip((first, second), inputs.split(","), strict=True)
    ]
    with jax.named_scope(SCOPE):
        return qwix.einsum(equation, *quantized, preferred_element_type=jnp.float32).astype(dtype)
