"""Attention of new tokens over a KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from graphtrain.config.schema import AttentionImplementation
from graphtrain.models.attention.cache_layout import is_rolling
from graphtrain.models.attention.kernel_support import AttentionSpec, uses_paged_kernel
from graphtrain.models.attention.kv_cache import CacheRows, LayerCache, cache_rows
from graphtrain.models.attention.online_softmax import Sums, add_keys, attention_of, no_sums
from graphtrain.models.attention.packed import attend_packed
from graphtrain.models.attention.paged import heads_match, paged_attention
from graphtrain.models.attention.score_mods import ScoreTransform
from lowering.tracing.constrain import constrain
from lowering.tracing.cpu_hints import on_cpu
from lowering.tracing.current_target import traced_target

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int


def attend_to_cache(
    cache: LayerCache,
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq kv_heads head_dim"],
    value: Float[Array, "batch seq kv_heads value_dim"],
    scoring: ScoreTransform,
    window: int | jax.Array | None = None,
    implementation: AttentionImplementation = "auto",
    sinks: Float[Array, " heads"] | None = None,
) -> Float[Array, "batch seq heads value_dim"]:
    """Add new tokens to a layer's KV cache, and return their attention to all of their sequence.

    One new token of each row is computed by a kernel of paged attention where the target has one.
    Packed texts are not added.

    Args:
        cache: KV cache of the layer, which is updated.
        query: Queries of the new tokens, with rotary embedding applied.
        key: Keys of the new tokens, with rotary embedding applied.
        value: Values of the new tokens.
        scoring: Transformation of query-key products into scores.
        window: Sliding window in positions; without it, a query sees all earlier keys.
        implementation: "dense" never uses a kernel.
        sinks: Logit of each query head's attention sink; without them, there are none.
    """
    rows, target = cache_rows(), traced_target()
    assert rows is not None
    if rows.packed is not None:
        output = attend_packed(cache, query, key, value, rows, scoring, window, sinks)
        return constrain(output, "batch", "seq", "heads", "head_dim")
    cache.update(key, value)
    _check_window(cache, query.shape[1], rows, window)
    spec = AttentionSpec(
        dtype=query.dtype.name,
        length=query.shape[1],
        head_dim=query.shape[3],
        window=window is not None,
        alibi=scoring.slopes is not None,
        sinks=sinks is not None,
        narrow_values=value.shape[3] != query.shape[3],
    )
    use_kernel = target and uses_paged_kernel(implementation, spec, target)
    if target and use_kernel and heads_match(key.shape[2]):
        output = paged_attention(cache, query, rows, scoring, target.platform)
    else:
        output = _attend_by_products(cache, query, rows, scoring, window, sinks)
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
    sinks: Float[Array, " heads"] | None,
) -> Float[Array, "batch seq heads value_dim"]:
    """Return the attention of new tokens by products with the whole cache.

    On a CPU the softmax is computed block by block of keys, over the blocks that a sequence has
    reached: time follows the tokens that there are, not the length of the cache. Elsewhere all
    scores are computed at once, because a loop of unknown length would wait for the host.
    """
    layout = rows.layout
    batch, length, heads, head_dim = query.shape
    cached_length = cache.key.shape[layout.key.index("k")]
    kv_heads = cache.key.shape[layout.key.index("h")]
    grouped = query.reshape(batch, length, kv_heads, heads // kv_heads, head_dim)
    positions = rows.positions(length)
    block = layout.block if on_cpu() else cached_length
    rolling = is_rolling(cached_length, rows.context_length)

    def add_block(index: jax.Array, carry: Sums) -> Sums:
        begin = (index % (cached_length // block) if rolling else index) * block
        keys = rows.block(cache.key, begin, block, layout.key)
        values = rows.block(cache.value, begin, block, layout.value)
        places = begin + jnp.arange(block)
        distance = _distance(positions, places, cached_length if rolling else None)
        layouts = layout.key, layout.value
        return add_keys(carry, grouped, keys, values, layouts, distance, scoring, window)

    carry = no_sums(grouped, cache.value.shape[layout.value.index("d")])
    if block == cached_length:
        carry = add_block(jnp.int32(0), carry)
    else:
        first, last = _blocks_in_use(positions, window, block)
        if rolling:  # the first and the last may be the same one
            last = jnp.minimum(last, first + cached_length // block)
        carry = jax.lax.fori_loop(first, last, add_block, carry)
    return attention_of(carry, query, sinks)


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


def _blocks_in_use(
    positions: jax.Array, window: int | jax.Array | None, block: int
) -> tuple[jax.Array, jax.Array]:
    """Return the range of blocks that some query sees."""
    last = positions.max() // block + 1
    if window is None:
        return jnp.int32(0), last
    nearest = jnp.maximum(positions.min().astype(jnp.int32) - window + 1, 0)
    return jnp.asarray(nearest // block, jnp.int32), last
