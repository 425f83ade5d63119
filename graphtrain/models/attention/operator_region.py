"""Attention as a marked region, for targets that have a fused operator for it.

The forward and the backward pass are one region each. Nothing of the scores' size is saved between
them: the backward pass reads the inputs, the output, and the maximum and sum of each softmax. Where
no operator replaces them, both passes are ordinary arithmetic and the backward pass recomputes the
scores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from graphtrain.models.attention.dot_product import (
    average_values,
    dot_product_attention,
    masked_scores,
)
from graphtrain.models.attention.score_mods import ScoreTransform
from graphtrain.models.attention.segment_mask import isolate_documents, segment_ids
from lowering.tracing.operator_regions import is_region_enabled, mark_region

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float

FORWARD, BACKWARD = "attention", "attention_gradient"
_STATISTIC_COPIES = 8  # copies of each softmax statistic in the operators' format


def uses_fused_operator(scoring: ScoreTransform) -> bool:
    """Return whether attention is a region: operators support neither soft cap nor ALiBi."""
    return is_region_enabled(FORWARD) and scoring.cap is None and scoring.slopes is None


def fused_attention(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq kv_heads head_dim"],
    value: Float[Array, "batch seq kv_heads head_dim"],
    scoring: ScoreTransform,
    window: jax.Array | None = None,
) -> Float[Array, "batch seq heads head_dim"]:
    """Compute `dot_product_attention` as one region forward and another backward.

    `window` is the sliding window in positions; without it, a query sees all earlier keys.
    """
    given = {"window": window, "documents": segment_ids()}
    hiding = {name: one for name, one in given.items() if one is not None}
    settings = {"scale": scoring.scale, "hiding": list(hiding)}

    def whole(*arrays: jax.Array) -> jax.Array:
        query, key, value, *hidden = arrays
        by_name = dict(zip(hiding, hidden, strict=True))
        with isolate_documents(by_name.get("documents")):
            return dot_product_attention(query, key, value, scoring, by_name.get("window"))

    def with_statistics(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        query, key, value, *hidden = arrays
        by_name = dict(zip(hiding, hidden, strict=True))
        with isolate_documents(by_name.get("documents")):
            scores = masked_scores(query, key, scoring, by_name.get("window"))
        return average_values(scores, value), *_statistics(scores)

    def gradients(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        gradient, _, _, _, query, key, value, *hidden = arrays
        _, back = jax.vjp(lambda *three: whole(*three, *hidden), query, key, value)
        return back(gradient)

    @jax.custom_vjp
    def attend(*arrays: jax.Array) -> jax.Array:
        return forward(*arrays)[0]

    def forward(*arrays: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        results = mark_region(FORWARD, with_statistics, *arrays, settings=settings)
        return results[0], (*results, *arrays)

    def backward(kept: tuple[jax.Array, ...], gradient: jax.Array) -> tuple[Any, ...]:
        found = mark_region(BACKWARD, gradients, gradient, *kept, settings=settings)
        return (*found, *(None for _ in hiding))

    attend.defvjp(forward, backward)
    return attend(query, key, value, *hiding.values())


def _statistics(
    scores: Float[Array, "batch kv_heads query group key"],
) -> tuple[jax.Array, jax.Array]:
    """Return each softmax's maximum score and sum of exponentials.

    Both are float32 (batch, heads, query, 8), the format of fused attention operators.
    """
    highest = scores.max(-1, keepdims=True)
    total = jnp.exp(scores - highest).sum(-1)

    def by_head(x: Float[Array, "batch kv_heads query group"]) -> jax.Array:
        batch, kv_heads, length, group = x.shape
        x = jnp.moveaxis(x, 2, 3).reshape(batch, kv_heads * group, length, 1)
        return jnp.broadcast_to(x, (*x.shape[:3], _STATISTIC_COPIES))

    return by_head(highest[..., 0]), by_head(total)
