"""Attention of packed texts: all of them continue the prefix in a slot, and are not cached.

Many texts lie one after the other in a row. Each token sees the prefix that the row's slot holds,
and of the row the tokens of its own text before it: of the text's trunk, and of its own branch, as
the answers to one question are branches that do not see each other. Keys and values of the prefix
exist once for all of them.

Source: Hydragen (Juravsky et al. 2024, section 3), https://arxiv.org/abs/2402.05099, for the split
into a shared prefix and suffixes; SpecInfer (Miao et al. 2024), https://arxiv.org/abs/2305.09781,
for attention over a tree of tokens
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from graphtrain.models.attention.kv_cache import CacheRows, LayerCache, PackedTokens
from graphtrain.models.attention.online_softmax import Sums, add_keys, attention_of, no_sums
from graphtrain.models.attention.score_mods import ScoreTransform
from lowering.tracing.cpu_hints import on_cpu

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int

_NEW = "bkhd"  # layout of the row's own keys and values
_TILE = 128  # tokens of a row whose attention to each other is computed at once, on a CPU


def attend_packed(
    cache: LayerCache,
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq kv_heads head_dim"],
    value: Float[Array, "batch seq kv_heads value_dim"],
    rows: CacheRows,
    scoring: ScoreTransform,
    window: int | jax.Array | None,
    sinks: Float[Array, " heads"] | None = None,
) -> Float[Array, "batch seq heads value_dim"]:
    """Return the attention of packed tokens to the prefix in the KV cache and to their own text."""
    packed, layout = rows.packed, rows.layout
    assert packed is not None
    grouped = query.reshape(*query.shape[:2], key.shape[2], -1, query.shape[3])
    cached_length = cache.key.shape[layout.key.index("k")]
    block = layout.block if on_cpu() else cached_length

    def add_block(index: jax.Array, sums: Sums) -> Sums:
        begin = index * block
        keys = rows.block(cache.key, begin, block, layout.key)
        values = rows.block(cache.value, begin, block, layout.value)
        distance = _to_prefix(packed, rows.offset, begin + jnp.arange(block), cached_length)
        layouts = layout.key, layout.value
        return add_keys(sums, grouped, keys, values, layouts, distance, scoring, window)

    sums = no_sums(grouped, cache.value.shape[layout.value.index("d")])
    if block == cached_length:
        sums = add_block(jnp.int32(0), sums)
    else:
        blocks = jnp.minimum(-(-rows.offset.max() // block), cached_length // block)
        sums = jax.lax.fori_loop(jnp.int32(0), blocks, add_block, sums)
    if on_cpu() and query.shape[1] > _TILE and query.shape[1] % _TILE == 0:
        sums = _add_texts_by_tiles(sums, grouped, key, value, packed, scoring, window)
    else:
        distance = _within_texts(packed, packed)
        sums = add_keys(sums, grouped, key, value, (_NEW, _NEW), distance, scoring, window)
    return attention_of(sums, query, sinks)


def _add_texts_by_tiles(
    sums: Sums,
    grouped: Float[Array, "batch seq kv_heads group head_dim"],
    key: Float[Array, "batch seq kv_heads head_dim"],
    value: Float[Array, "batch seq kv_heads value_dim"],
    packed: PackedTokens,
    scoring: ScoreTransform,
    window: int | jax.Array | None,
) -> Sums:
    """Add the row's own keys to the sums: of each tile of queries, from where its texts begin.

    Texts are short beside a row, so that most of its pairs of tiles share none.
    """
    first = (_first_tokens(packed.text) // _TILE).min(0).reshape(-1, _TILE).min(1)

    def tile(array: jax.Array, index: jax.Array, axis: int = 1) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(array, index * _TILE, _TILE, axis)

    def tokens(index: jax.Array) -> PackedTokens:
        return PackedTokens(
            tile(packed.position, index), tile(packed.text, index), tile(packed.branch, index)
        )

    def add_tile(index: jax.Array, sums: Sums) -> Sums:
        queries, places = tile(grouped, index), tokens(index)

        def add_block(at: jax.Array, carry: Sums) -> Sums:
            distance = _within_texts(places, tokens(at))
            new = tile(key, at), tile(value, at)
            return add_keys(carry, queries, *new, (_NEW, _NEW), distance, scoring, window)

        largest, total, output = (tile(array, index, 2) for array in sums)
        added = jax.lax.fori_loop(first[index], index + 1, add_block, (largest, total, output))
        largest, total, output = (
            jax.lax.dynamic_update_slice_in_dim(array, new, index * _TILE, 2)
            for array, new in zip(sums, added, strict=True)
        )
        return largest, total, output

    return jax.lax.fori_loop(0, len(first), add_tile, sums)


def _first_tokens(text: Int[Array, "batch seq"]) -> Int[Array, "batch seq"]:
    """Return the index of the first token of the text of each token; texts are contiguous."""
    begins = jnp.diff(text, axis=1, prepend=-1) != 0
    return jax.lax.cummax(jnp.where(begins, jnp.arange(text.shape[1]), 0), axis=1)


def _to_prefix(
    packed: PackedTokens, prefix: jax.Array, places: jax.Array, cached_length: int
) -> Int[Array, "batch seq places"]:
    """Return how many positions before each token the key at each place of the cache is.

    In a rolling buffer, a place holds the last position before the end of the prefix that is stored
    there. What padding has overwritten is farther away than the window, as in any chunk.
    """
    last = prefix[:, None] - 1
    position = last - (last - places) % cached_length
    distance = packed.position[:, :, None] - position[:, None, :]
    return jnp.where(position[:, None, :] >= 0, distance, -1)


def _within_texts(queries: PackedTokens, keys: PackedTokens) -> Int[Array, "batch seq places"]:
    """Return how many positions before each query each key of its row is; -1: it is not seen."""
    distance = queries.position[:, :, None] - keys.position[:, None, :]
    same_text = queries.text[:, :, None] == keys.text[:, None, :]
    branch = keys.branch[:, None, :]
    visible = same_text & ((branch == 0) | (branch == queries.branch[:, :, None]))
    return jnp.where(visible, distance, -1)
