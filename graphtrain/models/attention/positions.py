"""Position encodings in attention: rotary embedding (RoPE) and ALiBi slopes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from graphtrain.config.schema import Model
from graphtrain.models.attention.rope_scaling import attention_factor, scaled_frequencies
from lowering.tracing.cpu_hints import materialize

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int


def rotate(
    x: Float[Array, "batch seq heads head_dim"],
    positions: Int[Array, "#batch seq"] | Int[Array, " seq"],
    frequencies: Float[Array, " half"],
    factor: float | jax.Array = 1.0,
) -> Float[Array, "batch seq heads head_dim"]:
    """Apply rotary position embedding: rotate each pair (i, i + half) by its angle.

    An angle is position times frequency; sines and cosines are multiplied by `factor`. Angles are
    computed in float32 by the program, which stores no table. Dimensions of a head beyond twice the
    number of frequencies are returned as they are.

    Source: Su et al. 2021, "RoFormer", equation 34, https://arxiv.org/abs/2104.09864; the pairs are
    Hugging Face Llama's: halves, not neighbours.
    """
    angles = positions.astype(jnp.float32)[..., None, None] * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if not (isinstance(factor, float) and factor == 1):
        cos, sin = cos * factor, sin * factor
    cos, sin = materialize((cos, sin))  # not again for each head
    turned, others = x[..., : 2 * len(frequencies)], x[..., 2 * len(frequencies) :]
    first, second = jnp.split(turned.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    rotated = rotated.astype(x.dtype)
    return rotated if not others.size else jnp.concatenate([rotated, others], axis=-1)


def frequencies(
    model: Model, length: int, full: bool | jax.Array | None = None
) -> tuple[Float[Array, " half"], float | jax.Array]:
    """Return the rotary frequencies in radians per position, and the factor of their sines.

    Args:
        model: Settings; layers with a sliding window may have a base of their own.
        length: Sequence length of the program, or of its KV cache.
        full: Whether the layer has global attention, in a model whose other layers have a window.

    Source: Su et al. 2021, "RoFormer", section 3.2.2, https://arxiv.org/abs/2104.09864
    """
    half, scaling = model.rotary_dim // 2, model.rope_scaling
    global_frequencies = scaled_frequencies(model.rope_theta, half, scaling, length)
    factor = attention_factor(scaling)
    if model.sliding_window_rope_theta is None:
        return global_frequencies, factor
    local_frequencies = scaled_frequencies(model.sliding_window_rope_theta, half, None, length)
    if full is None:
        return local_frequencies, 1.0
    return (
        jnp.where(full, global_frequencies, local_frequencies),
        1.0 if factor == 1 else jnp.where(full, factor, 1.0),
    )


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
