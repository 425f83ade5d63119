"""From products of queries and keys to scores: scale, cap, slope by distance, mask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from graphtrain.config.schema import Model
from graphtrain.models.attention.positions import alibi_slopes

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int


@dataclass(frozen=True)
class Scoring:
    """What turns products into scores; the same for all layers of a model."""

    scale: float
    cap: float | None = None
    slopes: tuple[float, ...] | None = None  # of ALiBi, by query head

    @classmethod
    def of(cls, model: Model) -> Scoring:
        assert model.head_dim
        slopes = tuple(alibi_slopes(model.heads)) if model.positions == "alibi" else None
        return cls((model.score_divisor or model.head_dim) ** -0.5, model.score_cap, slopes)


def score(
    products: Float[Array, "batch kv_heads query group key"],
    distance: Int[Array, "query 1 key"],
    scoring: Scoring,
    window: Int[Array, ""] | None = None,
) -> Float[Array, "batch kv_heads query group key"]:
    """Scores; minus infinity for keys ahead of a query, and for those outside of its window.

    Args:
        products: of queries and keys, float32.
        distance: of each query from each key, in positions.
        scoring: what the model does with products.
        window: the distance that is too far.
    """
    scores = cap(products * scoring.scale, scoring.cap)
    if scoring.slopes is not None:
        by_head = jnp.array(scoring.slopes, jnp.float32).reshape(products.shape[1], 1, -1, 1)
        scores = scores - by_head * distance
    seen = distance >= 0
    if window is not None:
        seen &= distance < window
    return jnp.where(seen, scores, -jnp.inf)


def cap(scores: jax.Array, limit: float | None) -> jax.Array:
    """Bent smoothly to stay below a limit; none: as they are.

    Source: Gemma Team 2024, "Gemma 2", section 2, https://arxiv.org/abs/2408.00118
    """
    return scores if limit is None else limit * jnp.tanh(scores / limit)


def steepness(products: jax.Array, scoring: Scoring) -> float | jax.Array:
    """The derivative of a score that is seen by its product."""
    if scoring.cap is None:
        return scoring.scale
    bent = jnp.tanh(products * (scoring.scale / scoring.cap))
    return scoring.scale * (1 - jnp.square(bent))
