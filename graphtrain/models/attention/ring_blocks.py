"""Attention of one chunk of queries to one chunk of keys, one tile of queries at a time.

Queries are (chunk, tile, batch, kv_heads, query, group, head_dim), keys and values (chunk, batch,
kv_heads, key, head_dim): every product is batched over its leading axes and none is transposed.
`attend` and `gradients` take a single chunk, without the chunk axis. Sums and softmax are float32.

Source: Dao et al. 2022, "FlashAttention", appendix B, https://arxiv.org/abs/2205.14135
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from graphtrain.models.attention.kernel_support import RING_TILE
from graphtrain.models.attention.score_mods import (
    ScoreTransform,
    score_derivative,
    transform_scores,
)
from graphtrain.models.attention.segment_mask import Masks, mask_pairs
from graphtrain.models.matmul import dot


class ChunkOffsets(NamedTuple):
    """First positions of a chunk of queries and of a chunk of keys."""

    query: jax.Array
    key: jax.Array


class PartialAttention(NamedTuple):
    """Attention output over some of the keys, and the log-sum-exp of those keys' scores."""

    values: jax.Array  # float32, in the shape of the queries, with the width of values
    log_sum: jax.Array  # the same shape without the width

    @classmethod
    def empty(cls, queries: jax.Array, value_dim: int) -> PartialAttention:
        """Return the output over no keys: zeros, with a log-sum-exp of minus infinity."""
        log_sum = jnp.full_like(queries[..., 0], -jnp.inf, jnp.float32)
        return cls(jnp.zeros((*log_sum.shape, value_dim)), log_sum)


def tile_queries(x: jax.Array, kv_heads: int) -> jax.Array:
    """Reshape (batch, seq, heads, head_dim), with two chunks in seq, to chunks and tiles."""
    batch, length, heads, head_dim = x.shape
    tile = next(size for size in range(RING_TILE, 0, -1) if length // 2 % size == 0)
    tiles = x.reshape(batch, 2, -1, tile, kv_heads, heads // kv_heads, head_dim)
    return tiles.transpose(1, 2, 0, 4, 3, 5, 6)


def untile_queries(x: jax.Array) -> jax.Array:
    """Undo tile_queries."""
    chunks, tiles, batch, kv_heads, tile, group, head_dim = x.shape
    transposed = x.transpose(2, 0, 1, 4, 3, 5, 6)
    return transposed.reshape(batch, chunks * tiles * tile, kv_heads * group, head_dim)


def chunk_keys(x: jax.Array) -> jax.Array:
    """Reshape (batch, seq, kv_heads, head_dim), with two chunks in seq, to chunks."""
    batch, length, kv_heads, head_dim = x.shape
    return x.reshape(batch, 2, length // 2, kv_heads, head_dim).transpose(1, 0, 3, 2, 4)


def unchunk_keys(x: jax.Array) -> jax.Array:
    """Undo chunk_keys."""
    chunks, batch, kv_heads, length, head_dim = x.shape
    return x.transpose(1, 0, 3, 2, 4).reshape(batch, chunks * length, kv_heads, head_dim)


def attend(
    queries: jax.Array,
    keys: tuple[jax.Array, jax.Array],
    pair: ChunkOffsets,
    scoring: ScoreTransform,
    masks: Masks,
) -> PartialAttention:
    """Compute attention of a chunk of queries as if this chunk of keys and values were all."""
    key, value = keys

    def attend_tile(tile: tuple[jax.Array, jax.Array]) -> PartialAttention:
        query, query_start = tile
        _, scores = _scores(query, key, ChunkOffsets(query_start, pair.key), scoring, masks)
        log_sum = jax.nn.logsumexp(scores, axis=-1)
        # A mask may hide all these keys from a query; -inf - (-inf) would be NaN.
        has_mask = masks.window is not None or masks.documents is not None
        base = jnp.where(jnp.isfinite(log_sum), log_sum, 0) if has_mask else log_sum
        probs = jnp.exp(scores - base[..., None])
        return PartialAttention(dot("bhqgk,bhkd->bhqgd", probs, value, jnp.float32), log_sum)

    return lax.map(attend_tile, (queries, _tile_offsets(queries, pair)))


def merge(one: PartialAttention, other: PartialAttention) -> PartialAttention:
    """Merge two outputs over different keys into the output over all of them."""
    log_sum = jnp.logaddexp(one.log_sum, other.log_sum)
    weights = [jnp.exp(output.log_sum - log_sum)[..., None] for output in (one, other)]
    return PartialAttention(one.values * weights[0] + other.values * weights[1], log_sum)


def gradients(
    rows: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
    keys: tuple[jax.Array, jax.Array],
    pair: ChunkOffsets,
    scoring: ScoreTransform,
    masks: Masks,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Return a pair of chunks' gradients of its queries, and of its keys and values.

    Args:
        rows: Queries, the gradient of their output, the log-sum-exp of their scores over all keys,
            and the sum over head_dim of that gradient times the output.
        keys: A chunk of keys, and its values.
        pair: First positions of the chunks.
        scoring: Transformation of query-key products into scores.
        masks: Masks of the complete sequences.
    """
    key, value = keys

    def tile_gradients(sums: tuple[jax.Array, jax.Array], tile: tuple) -> tuple[tuple, jax.Array]:
        (query, gradient, log_sum, mean), query_start = tile
        products, scores = _scores(query, key, ChunkOffsets(query_start, pair.key), scoring, masks)
        probs = jnp.exp(scores - log_sum[..., None])
        grad_probs = dot("bhqgd,bhkd->bhqgk", gradient, value, jnp.float32)
        grad_products = probs * (grad_probs - mean[..., None]) * score_derivative(products, scoring)
        grad_query = dot("bhqgk,bhkd->bhqgd", grad_products, key, jnp.float32)
        grad_key = dot("bhqgk,bhqgd->bhkd", grad_products, query, jnp.float32)
        grad_value = dot("bhqgk,bhqgd->bhkd", probs, gradient, jnp.float32)
        return (sums[0] + grad_key, sums[1] + grad_value), grad_query

    zeros = jnp.zeros_like(key, jnp.float32), jnp.zeros_like(value, jnp.float32)
    tiles = rows, _tile_offsets(rows[0], pair)
    grad_keys, grad_queries = lax.scan(tile_gradients, zeros, tiles)
    return grad_queries, grad_keys


def _scores(
    query: jax.Array,
    key: jax.Array,
    pair: ChunkOffsets,
    scoring: ScoreTransform,
    masks: Masks,
) -> tuple[jax.Array, jax.Array]:
    """Return a tile's products and masked scores (batch, kv_heads, query, group, key), float32."""
    products = dot("bhqgd,bhkd->bhqgk", query, key, jnp.float32)
    relative = jnp.arange(query.shape[2])[:, None, None] - jnp.arange(key.shape[2])
    distance = pair.query - pair.key + relative  # (query, 1, key)
    scores = transform_scores(products, distance, scoring, masks.window)
    if (documents := masks.documents) is not None:
        of_queries, of_keys = (
            lax.dynamic_slice_in_dim(documents, start, count, 1)
            for start, count in ((pair.query, query.shape[2]), (pair.key, key.shape[2]))
        )
        scores = mask_pairs(scores, of_queries, of_keys)
    return products, scores


def _tile_offsets(queries: jax.Array, pair: ChunkOffsets) -> jax.Array:
    """Return the first position of each tile."""
    return pair.query + queries.shape[3] * jnp.arange(queries.shape[0])
