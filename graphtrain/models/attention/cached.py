"""Attention of new tokens over a KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from graphtrain.config.schema import AttentionImplementation
from graphtrain.models.attention.cache_layout import is_rolling
from graphtrain.models.attention.kernel_support import AttentionSpec, uses_paged_kernel
from graphtrain.models.attention.kv_cache import CacheRows, LayerCache, cache_rows
from graphtrain.models.attention.paged import heads_match, paged_attention
from graphtrain.models.attention.score_mods import ScoreTransform, transform_scores
from graphtrain.models.matmul import dot
from lowering.tracing.constrain import constrain
from lowering.tracing.cpu_hints import on_cpu
from lowering.tracing.current_target import traced_target

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int

_NO_SCORE = -1e30  # finite, so that the difference of two is no NaN


def attend_to_cache(
    cache: LayerCache,
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq kv_heads head_dim"],
    value: Float[Array, "batch seq kv_heads head_dim"],
    scoring: ScoreTransform,
    window: int | jax.Array | None = None,
    implementation: AttentionImplementation = "auto",
) -> Float[Array, "batch seq heads head_dim"]:
    """Add new tokens to a layer's KV cache, and return their attention to all of their sequence.

    One new token of each row is computed by a kernel of paged attention where the target has one.

    Args:
        cache: KV cache of the layer, which is updated.
        query: Queries of the new tokens, with rotary embedding applied.
        key: Keys of the new tokens, with rotary embedding applied.
        value: Values of the new tokens.
        scoring: Transformation of query-key products into scores.
        window: Sliding window in positions; without it, a query sees all earlier keys.
        implementation: "dense" never uses a kernel.
    """
    cache.update(key, value)
    rows, target = cache_rows(), traced_target()
    assert rows is not None
    _check_window(cache, query.shape[1], rows, window)
    spec = AttentionSpec(
        dtype=query.dtype.name,
        length=query.shape[1],
        head_dim=query.shape[3],
        window=window is not None,
        alibi=scoring.slopes is not None,
    )
    use_kernel = target and uses_paged_kernel(implementation, spec, target)
    if target and use_kernel and heads_match(key.shape[2]):
        output = paged_attention(cache, query, rows, scoring, target.platform)
    else:
        output = _attend_by_products(cache, query, rows, scoring, window)
    return constrain(output, "batch", "seq", "heads", "head_dim")


def _check_window(
    cache: LayerCache, new: int, rows: CacheRows, window: int | jax.Array | None
) -> None:
    """Check that a rolling buffer holds what each of the new tokens sees."""
    positions = cache.key.shape[rows.layout.key.index("k")]
    if is_rolling(positions, rows.context_length):
        assert isinstance(window, int) and positions >= window + new - 1, (positions, window, new)


def _attend_by_products(
    cache: LayerCache,
    query: Float[Array, "batch seq heads head_dim"],
    rows: CacheRows,
    scoring: ScoreTransform,
    window: int | jax.Array | None,
) -> Float[Array, "batch seq heads head_dim"]:
    """Return the attention of new tokens by products with the whole cache.

    On a CPU the softmax is computed block by block of keys, over the blocks that a sequence has
    reached: time follows the tokens that there are, not the length of the cache. Elsewhere all
    scores are computed at once, because a loop of unknown length would wait for the host.

    Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax", algorithm 3,
    https://arxiv.org/abs/1805.02867
    """
    layout = rows.layout
    batch, length, heads, head_dim = query.shape
    cached_length = cache.key.shape[layout.key.index("k")]
    kv_heads = cache.key.shape[layout.key.index("h")]
    grouped = query.reshape(batch, length, kv_heads, heads // kv_heads, head_dim)
    positions = rows.positions(length)
    block = layout.block if on_cpu() else cached_length
    rolling = is_rolling(cached_length, rows.context_length)

    def add_block(index: jax.Array, carry: tuple) -> tuple[jax.Array, jax.Array, jax.Array]:
        largest, total, output = carry
        begin = (index % (cached_length // block) if rolling else index) * block
        keys = _block(cache.key, rows, begin, block, layout.key)
        values = _block(cache.value, rows, begin, block, layout.value)
        products = dot(f"bqhgd,{layout.key}->bhqgk", grouped, keys.astype(query.dtype), jnp.float32)
        places = begin + jnp.arange(block)
        distance = _distance(positions, places, cached_length if rolling else None)
        scores = transform_scores(products, distance[:, None, :, None], scoring, window)
        new_largest = jnp.maximum(largest, scores.max(-1, keepdims=True))
        weights, scale = jnp.exp(scores - new_largest), jnp.exp(largest - new_largest)
        added = dot(
            f"bhqgk,{layout.value}->bhqgd",
            weights.astype(query.dtype),
            values.astype(query.dtype),
            jnp.float32,
        )
        return (
            new_largest,
            total * scale + weights.sum(-1, keepdims=True),
            output * scale + added,
        )

    shape = (batch, kv_heads, length, heads // kv_heads)
    carry = (
        jnp.full((*shape, 1), _NO_SCORE),
        jnp.zeros((*shape, 1)),
        jnp.zeros((*shape, head_dim)),
    )
    if block == cached_length:
        carry = add_block(jnp.int32(0), carry)
    else:
        first, last = _blocks_in_use(positions, window, block)
        if rolling:  # the first and the last may be the same one
            last = jnp.minimum(last, first + cached_length // block)
        carry = jax.lax.fori_loop(first, last, add_block, carry)
    _, total, output = carry
    output = (output / total).astype(query.dtype).transpose(0, 2, 1, 3, 4)
    return output.reshape(batch, length, heads, head_dim)


def _distance(
    positions: jax.Array, places: jax.Array, rolling: int | None
) -> Int[Array, "batch seq places"]:
    """Return how many positions before each new token the key at each place of the cache is.

    It is negative for places that the sequence has not reached.

    Args:
        positions: Positions of the new tokens.
        places: Places in the cache.
        rolling: Number of positions of a rolling buffer; None: places are positions.
    """
    if rolling is None:
        return positions[:, :, None] - places
    distance = (positions % rolling)[:, :, None] - places
    is_earlier_lap = (distance < 0) & (positions >= rolling)[:, :, None]
    return jnp.where(is_earlier_lap, distance + rolling, distance)


def _block(cache: jax.Array, rows: CacheRows, begin: jax.Array, size: int, dims: str) -> jax.Array:
    """Return the keys or values of positions `begin` to `begin + size`, for the rows of a batch."""
    slots, positions = dims.index("b"), dims.index("k")
    if rows.slot is None and size == cache.shape[positions]:
        return cache
    start, sizes = [jnp.int32(0)] * 4, list(cache.shape)
    start[positions], sizes[positions] = begin, size
    if rows.slot is not None:
        start[slots], sizes[slots] = rows.slot, 1
    return jax.lax.dynamic_slice(cache, start, sizes)


def _blocks_in_use(
    positions: jax.Array, window: int | jax.Array | None, block: int
) -> tuple[jax.Array, jax.Array]:
    """Return the range of blocks that some query sees."""
    last = positions.max() // block + 1
    if window is None:
        return jnp.int32(0), last
    nearest = jnp.maximum(positions.min().astype(jnp.int32) - window + 1, 0)
    return jnp.asarray(nearest // block, jnp.int32), last
