"""What attention computes of queries, keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from graphtrain.models.attention.score_mods import Scoring, score
from graphtrain.models.attention.segment_mask import hide_others
from graphtrain.models.matmul import dot

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float


def attention(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch attended kv_heads head_dim"],
    value: Float[Array, "batch attended kv_heads head_dim"],
    scoring: Scoring | None = None,
    window: jax.Array | None = None,
    begin: jax.Array | None = None,
) -> Float[Array, "batch seq heads head_dim"]:
    """Causal attention in which groups of query heads share one key and value head.

    Scores and softmax are float32 whatever the dtype of the inputs.

    Args:
        query: Of every position.
        key: Of every position.
        value: Of every position.
        scoring: What becomes of products; by default they are over the root of head_dim.
        window: The distance at which a query sees a key no more; without it, it sees all.
        begin: The position of the first query; without it, that of the first key.

    Source: Ainslie et al. 2023, "GQA", section 2.2, https://arxiv.org/abs/2305.13245
    """
    scoring = scoring or Scoring(query.shape[-1] ** -0.5)
    return mix(scores_of(query, key, scoring, window, begin), value)


def scores_of(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch attended kv_heads head_dim"],
    scoring: Scoring,
    window: jax.Array | None,
    begin: jax.Array | None = None,
) -> Float[Array, "batch kv_heads query group key"]:
    """Scores of every query and key, float32; minus infinity for those that do not meet."""
    batch, length, heads, head_dim = query.shape
    kv_heads = key.shape[2]
    grouped = query.reshape(batch, length, kv_heads, heads // kv_heads, head_dim)

    # h: key head, g: query head of its group, q and k: positions. "hqgk" is the order the product
    # comes in; any other would transpose the largest array of the model.
    products = dot("bqhgd,bkhd->bhqgk", grouped, key, jnp.float32)
    queries = jnp.arange(length) if begin is None else begin + jnp.arange(length)
    distance = queries[:, None, None] - jnp.arange(key.shape[1])  # (q, 1, k)
    return hide_others(score(products, distance, scoring, window))


def mix(
    scores: Float[Array, "batch kv_heads query group key"],
    value: Float[Array, "batch seq kv_heads head_dim"],
) -> Float[Array, "batch seq heads head_dim"]:
    """Values by the shares that scores give them."""
    mixed = dot("bhqgk,bkhd->bqhgd", jax.nn.softmax(scores, axis=-1), value)
    batch, length, kv_heads, group, head_dim = mixed.shape
    return mixed.reshape(batch, length, kv_heads * group, head_dim)
