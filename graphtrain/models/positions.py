"""How attention knows positions: rotary angles and ALiBi slopes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int


def rotate(
    x: Float[Array, "batch seq heads head_dim"],
    positions: Int[Array, "#batch seq"] | Int[Array, " seq"],
    base: float,
) -> Float[Array, "batch seq heads head_dim"]:
    """Turn each pair (i, i + head_dim / 2) by an angle proportional to its position.

    The angles are float32 and computed, so the program holds no table.

    Source: Su et al. 2021, "RoFormer", equation 34, https://arxiv.org/abs/2104.09864; the pairs are
    Hugging Face Llama's: halves, not neighbours.
    """
    half = x.shape[-1] // 2
    frequencies = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions.astype(jnp.float32)[..., None, None] * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def alibi_slopes(heads: int) -> list[float]:
    """By how much each head lowers a score per position of distance.

    A geometric sequence for a power of two; else that of the power of two below, then every other
    slope of the one above.

    Source: Press et al. 2022, "ALiBi", section 3, https://arxiv.org/abs/2108.12409; other numbers
    of heads: https://github.com/ofirpress/attention_with_linear_biases
    """
    power = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    between = [2 ** (-4 * (head + 1) / power) for head in range(0, 2 * power, 2)]
    return slopes + between[: heads - power]
