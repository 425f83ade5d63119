"""Weights of int8 that are multiplied without being stored in a wider dtype."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

LEVELS = 127  # int8 levels on each side of zero


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Int8Weight:
    """Symmetrically quantized weights with one scale for each output, in place of an array."""

    codes: jax.Array  # int8, in the shape of the weights
    scales: jax.Array  # float32, in the shape of the axes over which products do not sum

    def multiply(self, equation: str, x: jax.Array, dtype: DTypeLike) -> jax.Array:
        """Return the einsum of x and the weights, whose codes the compiler converts as it reads.

        The scale multiplies the sums: it is the same for all that an output sums.
        """
        operands, output = equation.split("->")
        # As if it depended on x: XLA would store converted weights before a loop over tokens.
        x, codes = jax.lax.optimization_barrier((x, self.codes))
        product = jnp.einsum(
            equation,
            x,
            codes.astype(x.dtype),
            precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
            preferred_element_type=jnp.float32,
        )
        letters = operands.split(",")[1]
        scaled = "".join(letter for letter in letters if letter in output)
        return jnp.einsum(f"{output},{scaled}->{output}", product, self.scales).astype(dtype)


def quantize_int8(array: jax.Array, summed: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Quantize an array to int8 codes, and float32 scales for the axes that are not in `summed`.

    The code of the largest magnitude along the summed axes is 127 or -127.
    """
    largest = jnp.abs(array.astype(jnp.float32)).max(summed, keepdims=True)
    scales = jnp.where(largest > 0, largest, 1) / LEVELS
    codes = jnp.round(array.astype(jnp.float32) / scales).astype(jnp.int8)
    return codes, scales.squeeze(summed)
