"""Attention scores from query-key products: scale, soft cap, ALiBi and mask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from graphtrain.config.schema import Model
from graphtrain.models.attention.positions import alibi_slopes
from graphtrain.models.attention.rope_scaling import latent_attention_factor

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int


@dataclass(frozen=True)
class ScoreTransform:
    """Transformation of query-key products into scores, the same for all layers of a model."""

    scale: float
    cap: float | None = None  # soft cap
    slopes: tuple[float, ...] | None = None  # ALiBi slope of each query head

    @classmethod
    def of(cls, model: Model) -> ScoreTransform:
        """Return the transformation of a model's settings."""
        assert model.head_dim
        slopes = tuple(alibi_slopes(model.heads)) if model.positions == "alibi" else None
        scale = (model.query_pre_attn_scalar or model.head_dim) ** -0.5
        if model.latent_attention is not None:
            scale *= latent_attention_factor(model.rope_scaling)
        return cls(
            scale,
            model.attn_logit_softcap,
            slopes,
        )


def transform_scores(
    products: Float[Array, "batch kv_heads query group key"],
    distance: Int[Array, "... query 1 key"],
    scoring: ScoreTransform,
    window: int | Int[Array, ""] | None = None,
) -> Float[Array, "batch kv_heads query group key"]:
    """Return scores; minus infinity for keys after the query and for keys outside of the window.

    Args:
        products: Query-key products, float32.
        distance: Position of the query minus position of the key.
        scoring: Scale, soft cap and ALiBi slopes.
        window: Sliding window: keys at this distance or farther are masked.
    """
    scores = soft_cap(products * scoring.scale, scoring.cap)
    if scoring.slopes is not None:
        slopes = jnp.array(scoring.slopes, jnp.float32).reshape(products.shape[1], 1, -1, 1)
        scores = scores - slopes * distance
    visible = distance >= 0
    if window is not None:
        visible &= distance < window
    return jnp.where(visible, scores, -jnp.inf)


def soft_cap(scores: jax.Array, limit: float | None) -> jax.Array:
    """Apply the soft cap `limit`; None leaves scores unchanged.

    Source: Gemma Team 2024, "Gemma 2", section 2, https://arxiv.org/abs/2408.00118
    """
    return scores if limit is None else limit * jnp.tanh(scores / limit)


def score_derivative(products: jax.Array, scoring: ScoreTransform) -> float | jax.Array:
    """Return the derivative of an unmasked score with respect to its product."""
    if scoring.cap is None:
        return scoring.scale
    capped = jnp.tanh(products * (scoring.scale / scoring.cap))
    return scoring.scale * (1 - jnp.square(capped))
