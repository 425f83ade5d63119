"""Scaling of rotary frequencies for models that were extended to longer sequences."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from graphtrain.config.schema import RopeScaling

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float


def scaled_frequencies(
    base: float, half: int, scaling: RopeScaling | None, length: int
) -> Float[Array, " half"]:
    """Return the rotary frequencies in radians per position.

    Args:
        base: Base of the angles, rope_theta.
        half: Number of frequencies, half of head_dim.
        scaling: Scaling. None: the frequencies of Su et al. 2021.
        length: Sequence length of the program, which decides with dynamic and longrope.

    Source: the sources of config.schema.RopeScaling; numerically those of transformers,
    modeling_rope_utils.py.
    """
    if scaling is None:
        return _unscaled(base, half)
    original = scaling.original_max_position_embeddings or length
    if scaling.kind == "dynamic":
        stretch = scaling.factor * max(length, original) / original - (scaling.factor - 1)
        return _unscaled(base * stretch ** (half / (half - 1)), half)
    unscaled = _unscaled(base, half)
    match scaling.kind:
        case "longrope":
            divisors = scaling.long_factor if length > original else scaling.short_factor
            return unscaled / jnp.array(divisors, jnp.float32)
        case "yarn":
            share = _yarn_unscaled_share(base, half, scaling)
        case "llama3":
            share = _llama3_unscaled_share(unscaled, scaling)
        case "linear":
            return unscaled / scaling.factor
    return (1 - share) * (unscaled / scaling.factor) + share * unscaled


def attention_factor(scaling: RopeScaling | None) -> float:
    """Return the factor of sines and cosines, which sharpens attention over longer sequences.

    Source: Peng et al. 2023, "YaRN", section 3.4, https://arxiv.org/abs/2309.00071; with mscale:
    DeepSeek-V2, https://arxiv.org/abs/2405.04434; longrope: Ding et al. 2024, section 3.3
    """
    if scaling is None or scaling.kind not in ("yarn", "longrope"):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.factor <= 1:
        return 1.0
    if scaling.kind == "longrope":
        assert scaling.original_max_position_embeddings
        original = math.log(scaling.original_max_position_embeddings)
        return math.sqrt(1 + math.log(scaling.factor) / original)
    growth = 0.1 * math.log(scaling.factor)
    if scaling.mscale and scaling.mscale_all_dim:
        return (growth * scaling.mscale + 1) / (growth * scaling.mscale_all_dim + 1)
    return growth + 1


def latent_attention_factor(scaling: RopeScaling | None) -> float:
    """Return the factor of scores of latent attention, whose queries are only partly rotated.

    Source: DeepSeek-V3, https://huggingface.co/deepseek-ai/DeepSeek-V3, modeling_deepseek.py
    """
    if scaling is None or not scaling.mscale_all_dim or scaling.factor <= 1:
        return 1.0
    return (0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1) ** 2


def _unscaled(base: float, half: int) -> Float[Array, " half"]:
    return base ** (-jnp.arange(half, dtype=jnp.float32) / half)


def _yarn_unscaled_share(base: float, half: int, scaling: RopeScaling) -> jax.Array:
    """Return how much of each frequency is not scaled: 1 for many turns, 0 for few."""
    assert scaling.original_max_position_embeddings
    original = scaling.original_max_position_embeddings

    def index_of(turns: float) -> float:
        """Return the index of the frequency with this many turns in the original length."""
        return half * math.log(original / (turns * 2 * math.pi)) / math.log(base)

    low, high = index_of(scaling.beta_fast or 32), index_of(scaling.beta_slow or 1)
    if scaling.truncate is not False:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    if low == high:
        high += 0.001  # as transformers
    ramp = (jnp.arange(half, dtype=jnp.float32) - low) / (high - low)
    return 1 - jnp.clip(ramp, 0, 1)


def _llama3_unscaled_share(unscaled: jax.Array, scaling: RopeScaling) -> jax.Array:
    """Return how much of each frequency is not scaled: 1 for many turns, 0 for few."""
    assert (
        scaling.low_freq_factor
        and scaling.high_freq_factor
        and scaling.original_max_position_embeddings
    )
    rotations = scaling.original_max_position_embeddings * unscaled / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    return jnp.clip((rotations - low) / (high - low), 0, 1)
