"""Attention in place of PyTorch's: the native decoder's, or of whole scores under any mask."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from graphtrain.config.schema import AttentionImplementation
from graphtrain.models.attention import module as native
from graphtrain.models.attention.kv_cache import cache_offset, layer_cache
from graphtrain.models.attention.score_mods import ScoreTransform
from graphtrain.models.attention.score_mods import soft_cap as bent
from graphtrain.models.attention.segment_mask import segment_ids
from graphtrain.models.matmul import dot
from lowering.tracing.constrain import constrain, size_of, split_of


def only_native() -> str | None:
    """What is asked of attention here that only the native one can do; None: nothing."""
    if segment_ids() is not None:
        return 'to tell documents of a row apart (batch.documents = "apart", context or generate)'
    if ring := split_of("attended"):
        return f"to split the keys of a sequence over {' x '.join(ring)} (the rules context)"
    return None if cache_offset() is None else "to continue a sequence"


def attend_causally(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    scoring: ScoreTransform,
    window: int | None = None,
    remat: str = "none",
    unroll: int = 1,
    how: AttentionImplementation = "auto",
) -> jax.Array:
    """By the native decoder's attention, which makes no mask: in a ring, say, or by documents.

    Args:
        query: (batch, heads, seq, head_dim).
        key: (batch, kv_heads, seq, head_dim).
        value: (batch, kv_heads, seq, value_dim).
        scoring: What becomes of products.
        window: The distance at which a query sees a key no more.
        remat: Of the model.
        unroll: How many blocks are written out in a turn.
        how: Whether by a kernel of the target.
    """
    value_dim, widest = value.shape[-1], max(query.shape[-1], value.shape[-1])
    query, key, value = (_wide(x, widest).transpose(0, 2, 1, 3) for x in (query, key, value))
    if (before := layer_cache()) is not None:
        key, value = before.update(key, value)
    elif window is not None and window >= query.shape[1]:
        window = None
    if key.shape[2] == 1:  # one head for all: each device has it
        key, value = (jnp.repeat(x, size_of("kv_heads"), 2) for x in (key, value))
    mixed = native.attend(query, key, value, scoring, window, remat, unroll, how)
    return mixed[..., :value_dim].transpose(0, 2, 1, 3)


def _wide(x: jax.Array, width: int) -> jax.Array:
    """Zeros at the end of each head, as those of values beside wider queries and keys."""
    missing = width - x.shape[-1]
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, missing))) if missing else x


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    seen: jax.Array | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    scale: float | None = None,
    dropout_key: jax.Array | None = None,
    cap: float | None = None,
) -> jax.Array:
    """Values mixed by a float32 softmax of scores; zeros where a query sees no key at all.

    Args:
        query: (batch, heads, queries, head_dim); a group of heads may share one of the keys'.
        key: (batch, kv_heads, keys, head_dim).
        value: (batch, kv_heads, keys, value_dim).
        seen: bool, true where a key is seen, or numbers added to scores; of a shape that broadcasts
            to (batch, heads, queries, keys).
        dropout: the part of the softmax that is zeroed.
        causal: whether query i sees key j only for j <= i, as PyTorch counts them.
        scale: of products; the root of head_dim divides them by default.
        dropout_key: for dropout.
        cap: that scores are bent to stay below.

    Source: the definition at https://docs.pytorch.org/docs/stable/generated/
    torch.nn.functional.scaled_dot_product_attention.html
    """
    batch, heads, queries, head_dim = query.shape
    kv_heads, keys = key.shape[1:3]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads are not a multiple of {kv_heads} key heads")
    query = constrain(query, "batch", "heads", None, None)
    by_head = "kv_heads" if kv_heads > 1 else None  # one head for all is whole on every device
    key, value = (constrain(x, "batch", by_head, None, None) for x in (key, value))
    groups = kv_heads, heads // kv_heads
    # h: key head, g: query head of its group, q and k: positions.
    products = dot(
        "bhgqd,bhkd->bhgqk", query.reshape(batch, *groups, queries, head_dim), key, jnp.float32
    )
    scores = bent(products * (1 / math.sqrt(head_dim) if scale is None else scale), cap)
    mask = jnp.tril(jnp.ones((queries, keys), bool)) if causal else None
    if seen is not None:
        given = _grouped(seen, groups)
        if given.dtype == jnp.bool_:
            mask = given if mask is None else mask & given
        else:
            scores = scores + given
            # Rows of minus infinity alone, as some masks are written, see nothing either.
            mask = _and(mask, scores > -jnp.inf)
    shares = _softmax(scores, mask)
    if dropout and dropout_key is not None:
        kept = jax.random.bernoulli(dropout_key, 1 - dropout, shares.shape)
        shares = jnp.where(kept, shares / (1 - dropout), 0)
    mixed = dot("bhgqk,bhkd->bhgqd", shares.astype(value.dtype), value)
    out = mixed.reshape(batch, heads, queries, value.shape[-1])
    return constrain(out, "batch", "heads", None, None)


def _and(one: jax.Array | None, other: jax.Array) -> jax.Array:
    return other if one is None else one & other


def _grouped(seen: jax.Array, groups: tuple[int, int]) -> jax.Array:
    """A mask over (batch, heads, queries, keys) with its heads in groups."""
    whole = seen.reshape((1,) * (4 - seen.ndim) + seen.shape)
    if whole.shape[1] == 1:
        return whole[:, :, None]
    return whole.reshape(whole.shape[0], *groups, *whole.shape[2:])


def _softmax(scores: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Over keys; no part of it is not a number, in the gradient neither."""
    if mask is None:
        return jax.nn.softmax(scores, axis=-1)
    low = jnp.finfo(scores.dtype).min
    shares = jax.nn.softmax(jnp.where(mask, scores, low), axis=-1)
    return jnp.where(mask, shares, 0)
