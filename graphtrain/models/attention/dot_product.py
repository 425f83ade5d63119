"""Dot-product attention with all scores in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from graphtrain.models.attention.score_mods import ScoreTransform, transform_scores
from graphtrain.models.attention.segment_mask import mask_other_segments
from graphtrain.models.attention.sinks import by_group
from graphtrain.models.matmul import dot

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float


def dot_product_attention(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch kv_seq kv_heads head_dim"],
    value: Float[Array, "batch kv_seq kv_heads value_dim"],
    scoring: ScoreTransform | None = None,
    window: jax.Array | None = None,
    sinks: Float[Array, " heads"] | None = None,
) -> Float[Array, "batch seq heads value_dim"]:
    """Compute causal attention in which groups of query heads share one key and value head.

    Scores and softmax are float32 whatever the dtype of the inputs.

    Args:
        query: Queries.
        key: Keys.
        value: Values.
        scoring: Transformation of query-key products into scores; by default, division by the
            square root of head_dim.
        window: Sliding window in positions; without it, a query sees all earlier keys.
        sinks: Logit of each query head's attention sink; without them, there are none.

    Source: Ainslie et al. 2023, "GQA", section 2.2, https://arxiv.org/abs/2305.13245
    """
    scoring = scoring or ScoreTransform(query.shape[-1] ** -0.5)
    return average_values(masked_scores(query, key, scoring, window), value, sinks)


def masked_scores(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch kv_seq kv_heads head_dim"],
    scoring: ScoreTransform,
    window: jax.Array | None,
) -> Float[Array, "batch kv_heads query group key"]:
    """Return float32 scores of every query and key; those of masked pairs are minus infinity."""
    batch, length, heads, head_dim = query.shape
    kv_heads = key.shape[2]
    grouped = query.reshape(batch, length, kv_heads, heads // kv_heads, head_dim)

    # h: key head, g: query head of its group, q and k: positions. "hqgk" is the order the product
    # comes in; any other would transpose the largest array of the model.
    products = dot("bqhgd,bkhd->bhqgk", grouped, key, jnp.float32)
    distance = jnp.arange(length)[:, None, None] - jnp.arange(key.shape[1])  # (q, 1, k)
    return mask_other_segments(transform_scores(products, distance, scoring, window))


def average_values(
    scores: Float[Array, "batch kv_heads query group key"],
    value: Float[Array, "batch key kv_heads head_dim"],
    sinks: Float[Array, " heads"] | None = None,
) -> Float[Array, "batch query heads head_dim"]:
    """Return the values' mean, weighted by the softmax of the scores and the sinks."""
    if sinks is None:
        probs = jax.nn.softmax(scores, axis=-1)
    else:
        log_sum = jax.nn.logsumexp(scores, axis=-1)
        total = jnp.logaddexp(log_sum, by_group(sinks, scores.shape[1]))
        probs = jnp.exp(scores - total[..., None])
    output = dot("bhqgk,bkhd->bqhgd", probs, value)
    batch, length, kv_heads, group, head_dim = output.shape
    return output.reshape(batch, length, kv_heads * group, head_dim)
