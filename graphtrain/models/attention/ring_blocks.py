"""Attention of one chunk of queries to one chunk of keys, a tile of queries at a time.

Queries are (chunk, tile, batch, kv_heads, query, group, head_dim), keys and values (chunk, batch,
kv_heads, key, head_dim): every product is batched over its leading axes and none is transposed.
What is here takes one chunk. Sums and softmax are float32.

Source: Dao et al. 2022, "FlashAttention", appendix B, https://arxiv.org/abs/2205.14135
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from graphtrain.models.attention.score_mods import Scoring, score, steepness
from graphtrain.models.matmul import dot

_TILE = 512  # queries whose scores exist at once, at most


class Pair(NamedTuple):
    """Positions at which a chunk of queries and a chunk of keys begin."""

    query: jax.Array
    key: jax.Array


class Mixed(NamedTuple):
    """Values mixed by a softmax over some of the keys, and the log-sum of those keys' scores."""

    values: jax.Array  # as the queries
    log_sum: jax.Array  # without head_dim

    @classmethod
    def nothing(cls, queries: jax.Array) -> Mixed:
        """Of no keys."""
        values = jnp.zeros_like(queries, jnp.float32)
        return cls(values, jnp.full_like(values[..., 0], -jnp.inf))


def divide_queries(x: jax.Array, kv_heads: int) -> jax.Array:
    """(batch, seq, heads, head_dim), with two chunks in seq, to chunks and tiles."""
    batch, length, heads, head_dim = x.shape
    tile = next(size for size in range(_TILE, 0, -1) if length // 2 % size == 0)
    tiles = x.reshape(batch, 2, -1, tile, kv_heads, heads // kv_heads, head_dim)
    return tiles.transpose(1, 2, 0, 4, 3, 5, 6)


def join_queries(x: jax.Array) -> jax.Array:
    """What divide_queries was given."""
    chunks, tiles, batch, kv_heads, tile, group, head_dim = x.shape
    whole = x.transpose(2, 0, 1, 4, 3, 5, 6)
    return whole.reshape(batch, chunks * tiles * tile, kv_heads * group, head_dim)


def divide_keys(x: jax.Array) -> jax.Array:
    """(batch, seq, kv_heads, head_dim), with two chunks in seq, to chunks."""
    batch, length, kv_heads, head_dim = x.shape
    return x.reshape(batch, 2, length // 2, kv_heads, head_dim).transpose(1, 0, 3, 2, 4)


def join_keys(x: jax.Array) -> jax.Array:
    """What divide_keys was given."""
    chunks, batch, kv_heads, length, head_dim = x.shape
    return x.transpose(1, 0, 3, 2, 4).reshape(batch, chunks * length, kv_heads, head_dim)


def attend(
    queries: jax.Array,
    keys: tuple[jax.Array, jax.Array],
    pair: Pair,
    scoring: Scoring,
    window: jax.Array | None = None,
) -> Mixed:
    """Attention of a chunk of queries to chunks of keys and values, as if these were all."""
    key, value = keys

    def one(tile: tuple[jax.Array, jax.Array]) -> Mixed:
        query, begin = tile
        _, scores = _scores(query, key, Pair(begin, pair.key), scoring, window)
        log_sum = jax.nn.logsumexp(scores, axis=-1)
        # A window may leave a query nothing of these keys: minus infinity less itself is no number.
        base = log_sum if window is None else jnp.where(jnp.isfinite(log_sum), log_sum, 0)
        shares = jnp.exp(scores - base[..., None])
        return Mixed(dot("bhqgk,bhkd->bhqgd", shares, value, jnp.float32), log_sum)

    return lax.map(one, (queries, _begins(queries, pair)))


def merge(one: Mixed, other: Mixed) -> Mixed:
    """Values mixed by the keys of both."""
    log_sum = jnp.logaddexp(one.log_sum, other.log_sum)
    shares = [jnp.exp(each.log_sum - log_sum)[..., None] for each in (one, other)]
    return Mixed(one.values * shares[0] + other.values * shares[1], log_sum)


def gradients(
    rows: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
    keys: tuple[jax.Array, jax.Array],
    pair: Pair,
    scoring: Scoring,
    window: jax.Array | None = None,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """What a pair of chunks adds to the gradients of its queries, and of its keys and values.

    Args:
        rows: of the queries: themselves, the gradient of what they mix, the log-sum of their scores
            over all keys, and the sum over head_dim of that gradient times what they mix.
        keys: a chunk of keys, and of their values.
        pair: where the chunks begin.
        scoring: what becomes of products.
        window: the distance at which a query sees a key no more.
    """
    key, value = keys

    def one(sums: tuple[jax.Array, jax.Array], tile: tuple) -> tuple[tuple, jax.Array]:
        (query, gradient, log_sum, mean), begin = tile
        products, scores = _scores(query, key, Pair(begin, pair.key), scoring, window)
        shares = jnp.exp(scores - log_sum[..., None])
        of_shares = dot("bhqgd,bhkd->bhqgk", gradient, value, jnp.float32)
        of_products = shares * (of_shares - mean[..., None]) * steepness(products, scoring)
        of_query = dot("bhqgk,bhkd->bhqgd", of_products, key, jnp.float32)
        of_key = dot("bhqgk,bhqgd->bhkd", of_products, query, jnp.float32)
        of_value = dot("bhqgk,bhqgd->bhkd", shares, gradient, jnp.float32)
        return (sums[0] + of_key, sums[1] + of_value), of_query

    zeros = jnp.zeros_like(key, jnp.float32), jnp.zeros_like(value, jnp.float32)
    tiles = rows, _begins(rows[0], pair)
    of_keys, of_queries = lax.scan(one, zeros, tiles)
    return of_queries, of_keys


def _scores(
    query: jax.Array, key: jax.Array, pair: Pair, scoring: Scoring, window: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Products of a tile and its masked scores, (batch, kv_heads, query, group, key), float32."""
    products = dot("bhqgd,bhkd->bhqgk", query, key, jnp.float32)
    within = jnp.arange(query.shape[2])[:, None, None] - jnp.arange(key.shape[2])
    distance = pair.query - pair.key + within  # (query, 1, key)
    return products, score(products, distance, scoring, window)


def _begins(queries: jax.Array, pair: Pair) -> jax.Array:
    """Position at which each tile begins."""
    return pair.query + queries.shape[3] * jnp.arange(queries.shape[0])
