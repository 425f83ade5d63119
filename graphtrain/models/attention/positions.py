"""Position encodings in attention: rotary embedding (RoPE) and ALiBi slopes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from graphtrain.config.schema import Model, RopeScaling
from lowering.tracing.cpu_hints import materialize

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int


def rotate(
    x: Float[Array, "batch seq heads head_dim"],
    positions: Int[Array, "#batch seq"] | Int[Array, " seq"],
    frequencies: Float[Array, " half"],
) -> Float[Array, "batch seq heads head_dim"]:
    """Apply rotary position embedding: rotate each pair (i, i + head_dim / 2) by its angle.

    An angle is position times frequency. Angles are computed in float32 by the program, which
    stores no table.

    Source: Su et al. 2021, "RoFormer", equation 34, https://arxiv.org/abs/2104.09864; the pairs are
    Hugging Face Llama's: halves, not neighbours.
    """
    angles = positions.astype(jnp.float32)[..., None, None] * frequencies
    cos, sin = materialize((jnp.cos(angles), jnp.sin(angles)))  # not again for each head
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def frequencies(model: Model, full: jax.Array | None = None) -> Float[Array, " half"]:
    """Return the rotary frequencies in radians per position, after scaling.

    Args:
        model: Settings; layers with a sliding window may have a base of their own.
        full: Whether the layer has global attention, in a model whose other layers have a window.

    Source: Su et al. 2021, "RoFormer", section 3.2.2, https://arxiv.org/abs/2104.09864; scaling as
    in config.schema.RopeScaling.
    """
    assert model.head_dim
    half = model.head_dim // 2

    def inverse_frequencies(base: float) -> Float[Array, " half"]:
        return base ** (-jnp.arange(half, dtype=jnp.float32) / half)

    global_frequencies = _scaled(inverse_frequencies(model.rope_theta), model.rope_scaling)
    if model.sliding_window_rope_theta is None:
        return global_frequencies
    local_frequencies = inverse_frequencies(model.sliding_window_rope_theta)
    return (
        local_frequencies
        if full is None
        else jnp.where(full, global_frequencies, local_frequencies)
    )


def _scaled(unscaled: jax.Array, scaling: RopeScaling | None) -> jax.Array:
    if scaling is None:
        return unscaled
    interpolated = unscaled / scaling.factor
    if scaling.kind == "linear":
        return interpolated
    assert (
        scaling.low_freq_factor
        and scaling.high_freq_factor
        and scaling.original_max_position_embeddings
    )
    # By rotations within the original length: few are divided by the factor, many are unchanged,
    # and those between are interpolated.
    rotations = scaling.original_max_position_embeddings * unscaled / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    share = jnp.clip((rotations - low) / (high - low), 0, 1)
    return (1 - share) * interpolated + share * unscaled


def alibi_slopes(heads: int) -> list[float]:
    """Return each head's slope: how much its scores decrease per position of distance.

    A geometric sequence for a power of two; else that of the power of two below, then every other
    slope of the one above.

    Source: Press et al. 2022, "ALiBi", section 3, https://arxiv.org/abs/2108.12409; other numbers
    of heads: https://github.com/ofirpress/attention_with_linear_biases
    """
    power = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    intermediate_slopes = [2 ** (-4 * (head + 1) / power) for head in range(0, 2 * power, 2)]
    return slopes + intermediate_slopes[: heads - power]
