"""dot: the one matrix product of the models; bfloat16 in, float32 inside, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from lowering.tracing.current_target import traced_target


def dot(equation: str, a: jax.Array, b: jax.Array, dtype: DTypeLike | None = None) -> jax.Array:
    """Einsum of two arrays, in bfloat16 if either is, with sums in float32.

    The result has the dtype the product is computed in, unless told another. Each gradient is
    computed alike and has the dtype of its operand, so a float32 weight gets the float32 sums.

    XLA:CPU uses matrix units only for bfloat16 x bfloat16 -> float32, and JAX's own gradient of
    that product is float32 x bfloat16; hence the gradient here. Cards and TPUs add up in float32
    whatever they are asked for, so there a bfloat16 result is asked for: what devices then add up
    between them travels in bfloat16, half the bytes.

    Args:
        equation: As for einsum; every letter is in at least two of the three arrays.
        a: One operand, float32 or bfloat16.
        b: The other.
        dtype: Of the result; float32 keeps the sums unrounded.
    """
    return _dot(equation, a, b, dtype or _computed_in(a, b))


def dots(equation: str, a: jax.Array, several: Sequence[jax.Array]) -> list[jax.Array]:
    """dot of one array with several, whose gradients of it are added up before devices add up.

    With the several split by columns over devices, so that every gradient of a is a partial sum,
    that is one reduction and not one for each.
    """
    return _dots(equation, a, tuple(several))


def _product(equation: str, a: jax.Array, b: jax.Array, dtype: DTypeLike) -> jax.Array:
    computed_in = _computed_in(a, b)
    # Without HIGHEST, TPUs and GPUs would round float32 operands to fewer bits.
    exact = jax.lax.Precision.HIGHEST if computed_in == jnp.float32 else None
    a, b = a.astype(computed_in), b.astype(computed_in)
    sums_in = computed_in if dtype == computed_in and _rounds_sums() else jnp.float32
    sums = jnp.einsum(equation, a, b, precision=exact, preferred_element_type=sums_in)
    return sums.astype(dtype)


def _rounds_sums() -> bool:
    """Whether devices add up in float32 and round by themselves; not so where nobody said."""
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


def _products(equation: str, a: jax.Array, several: tuple[jax.Array, ...]) -> list[jax.Array]:
    return [_product(equation, a, b, _computed_in(a, b)) for b in several]


def _products_forward(
    equation: str, a: jax.Array, several: tuple[jax.Array, ...]
) -> tuple[list[jax.Array], tuple[jax.Array, tuple[jax.Array, ...]]]:
    return _products(equation, a, several), (a, several)


def _products_backward(
    equation: str,
    operands: tuple[jax.Array, tuple[jax.Array, ...]],
    gradients: list[jax.Array],
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    a, several = operands
    inputs, out = equation.split("->")
    a_axes, b_axes = inputs.split(",")
    pairs = [
        (gradient.astype(_computed_in(a, b)), b)
        for gradient, b in zip(gradients, several, strict=True)
    ]
    added_in = a.dtype if _rounds_sums() else jnp.float32
    for_a = sum(
        _product(f"{out},{b_axes}->{a_axes}", gradient, b, added_in) for gradient, b in pairs
    )
    for_several = tuple(
        _product(f"{a_axes},{out}->{b_axes}", a, gradient, b.dtype) for gradient, b in pairs
    )
    return jnp.asarray(for_a).astype(a.dtype), for_several


_dots = jax.custom_vjp(_products, nondiff_argnums=(0,))
_dots.defvjp(_products_forward, _products_backward)
