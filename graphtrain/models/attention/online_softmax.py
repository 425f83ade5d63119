"""Attention over keys that come block by block: sums of weights and values, rescaled on the way.

Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax", algorithm 3,
https://arxiv.org/abs/1805.02867
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from graphtrain.models.attention.score_mods import ScoreTransform, transform_scores
from graphtrain.models.attention.sinks import by_group
from graphtrain.models.matmul import dot

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int

_NO_SCORE = -1e30  # finite, so that the difference of two is no NaN

Sums = tuple[jax.Array, jax.Array, jax.Array]  # largest score, sum of weights, weighted values


def no_sums(grouped: Float[Array, "batch seq kv_heads group head_dim"], value_dim: int) -> Sums:
    """Return the sums before the first block of keys; `value_dim` is the width of values."""
    batch, length, kv_heads, group, _ = grouped.shape
    shape = (batch, kv_heads, length, group)
    return (
        jnp.full((*shape, 1), _NO_SCORE),
        jnp.zeros((*shape, 1)),
        jnp.zeros((*shape, value_dim)),
    )


def add_keys(
    sums: Sums,
    grouped: Float[Array, "batch seq kv_heads group head_dim"],
    keys: Float[Array, "_ _ _ _"],
    values: Float[Array, "_ _ _ _"],
    layouts: tuple[str, str],
    distance: Int[Array, "batch seq places"],
    scoring: ScoreTransform,
    window: int | jax.Array | None,
) -> Sums:
    """Add a block of keys and values to the sums.

    Args:
        sums: Sums of the blocks before.
        grouped: Queries, by the KV head that they share.
        keys: Keys of the block.
        values: Values of the block.
        layouts: Dimensions of keys and values: b for rows, h for KV heads, k for positions, d.
        distance: Position of each query minus that of each key; negative: it is not seen.
        scoring: Transformation of query-key products into scores.
        window: Sliding window in positions.
    """
    largest, total, output = sums
    of_keys, of_values = layouts
    products = dot(f"bqhgd,{of_keys}->bhqgk", grouped, keys.astype(grouped.dtype), jnp.float32)
    scores = transform_scores(products, distance[:, None, :, None], scoring, window)
    new_largest = jnp.maximum(largest, scores.max(-1, keepdims=True))
    weights, scale = jnp.exp(scores - new_largest), jnp.exp(largest - new_largest)
    added = dot(
        f"bhqgk,{of_values}->bhqgd",
        weights.astype(grouped.dtype),
        values.astype(grouped.dtype),
        jnp.float32,
    )
    return (
        new_largest,
        total * scale + weights.sum(-1, keepdims=True),
        output * scale + added,
    )


def attention_of(sums: Sums, query: jax.Array, sinks: jax.Array | None = None) -> jax.Array:
    """Return the attention (batch, seq, heads, value_dim) of `query` from its complete sums.

    `sinks` (heads,) are the logits of attention sinks; without them, there are none.
    """
    largest, total, output = sums
    if sinks is not None:
        logits = by_group(sinks, total.shape[1])[..., None]
        highest = jnp.maximum(largest, logits)
        scale = jnp.exp(largest - highest)
        total, output = total * scale + jnp.exp(logits - highest), output * scale
    output = (output / total).astype(query.dtype).transpose(0, 2, 1, 3, 4)
    return output.reshape(*query.shape[:3], -1)
