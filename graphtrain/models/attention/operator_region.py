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
    optional_masks = {"window": window, "documents": segment_ids()}
    mask_arrays = {name: mask for name, mask in optional_masks.items() if mask is not None}
    settings = {"scale": scoring.scale, "hiding": list(mask_arrays)}

    def plain_attention(*arrays: jax.Array) -> jax.Array:
        query, key, value, *mask_values = arrays
        masks = dict(zip(mask_arrays, mask_values, strict=True))
        with isolate_documents(masks.get("documents")):
            return dot_product_attention(query, key, value, scoring, masks.get("window"))

    def with_statistics(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        query, key, value, *mask_values = arrays
        masks = dict(zip(mask_arrays, mask_values, strict=True))
        with isolate_documents(masks.get("documents")):
            scores = masked_scores(query, key, scoring, masks.get("window"))
        return average_values(scores, value), *_statistics(scores)

    def gradients(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        gradient, _, _, _, query, key, value, *mask_values = arrays
        _, vjp = jax.vjp(lambda *qkv: plain_attention(*qkv, *mask_values), query, key, value)
        return vjp(gradient)

    @jax.custom_vjp
    def attend(*arrays: jax.Array) -> jax.Array:
        return forward(*arrays)[0]

    def forward(*arrays: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        results = mark_region(FORWARD, with_statistics, *arrays, settings=settings)
        return results[0], (*results, *arrays)

    def backward(residuals: tuple[jax.Array, ...], gradient: jax.Array) -> tuple[Any, ...]:
        grads = mark_region(BACKWARD, gradients, gradient, *residuals, settings=settings)
        return (*grads, *(None for _ in mask_arrays))

    attend.defvjp(forward, backward)
    return attend(query, key, value, *mask_arrays.values())


def _statistics(
    scores: Float[Array, "batch kv_heads query group key"],
) -> tuple[jax.Array, jax.Array]:
    """Return each softmax's maximum score and sum of exponentials.

    Both are float32 (batch, heads, query, 8), the format of fused attention operators.
    """
    highest = scores.max(-1, keepdims=True)
    total = jnp.exp(scores - highest).sum(-1)

    def to_statistic_layout(x: Float[Array, "batch kv_heads query group"]) -> jax.Array:
        batch, kv_heads, length, group = x.shape
        x = jnp.moveaxis(x, 2, 3).reshape(batch, kv_heads * group, length, 1)
        return jnp.broadcast_to(x, (*x.shape[:3], _STATISTIC_COPIES))

    return to_statistic_layout(highest[..., 0]), to_statistic_layout(total)
