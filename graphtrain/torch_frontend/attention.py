"""Attention of imported models: the native decoder's, or dense attention under any mask."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import torch

from graphtrain.config.schema import AttentionImplementation
from graphtrain.errors import ImportedModelError
from graphtrain.models.attention import module as native
from graphtrain.models.attention.cached import attend_to_cache
from graphtrain.models.attention.kv_cache import LayerCache, cache_rows, layer_cache
from graphtrain.models.attention.score_mods import ScoreTransform, soft_cap
from graphtrain.models.attention.segment_mask import segment_ids
from graphtrain.models.matmul import dot
from lowering.tracing.constrain import constrain, mesh_axes_of, shards_of


def feature_needing_native_attention() -> str | None:
    """Return the active feature that only the native attention supports, or None."""
    if segment_ids() is not None:
        return (
            "isolating the documents of a row (batch.cross_document_attention = false, the rules "
            "context, or "
            "graphtrain generate)"
        )
    if ring := mesh_axes_of("kv_seq"):
        return f"splitting the keys of a sequence over {' x '.join(ring)} (the rules context)"
    return None if cache_rows() is None else "decoding with a KV cache"


def requested_feature(how: AttentionImplementation) -> str | None:
    """Return the requested feature that only the native attention supports, or None.

    Args:
        how: program.model.attention.
    """
    forced = 'program.model.attention = "flash"' if how == "flash" else None
    return feature_needing_native_attention() or forced


def refuse_own_attention(
    module: torch.nn.Module, how: AttentionImplementation, *, is_hf: bool
) -> None:
    """Refuse a module that computes its own attention, if a feature needs the native one.

    Args:
        module: A module that did not call the native attention.
        how: program.model.attention.
        is_hf: Whether it is a model of transformers.

    Raises:
        ImportedModelError: such a feature is requested.
    """
    if (feature := requested_feature(how)) is None:
        return
    advice = "call scaled_dot_product_attention with is_causal = True"
    if is_hf:
        advice = "use the native decoder (graphtrain convert hf-to-graphtrain)"
    raise ImportedModelError(
        f"{feature} requires graphtrain's attention, but {type(module).__name__} computes "
        f"its own or applies dropout to it; {advice}"
    )


def causal_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    scoring: ScoreTransform,
    window: int | None = None,
    remat: str = "none",
    unroll: int = 1,
    how: AttentionImplementation = "auto",
) -> jax.Array:
    """Compute causal attention as the native decoder does, without materialising a mask.

    It supports context parallelism, isolated documents and the KV cache.

    Args:
        query: (batch, heads, seq, head_dim).
        key: (batch, kv_heads, seq, head_dim).
        value: (batch, kv_heads, seq, value_dim).
        scoring: scale and soft cap of attention scores.
        window: sliding window in tokens; None: unlimited.
        remat: activation checkpointing of the model.
        unroll: number of blocks per iteration of the scan over blocks.
        how: attention implementation: "auto", "flash" or "dense".

    Returns:
        (batch, heads, seq, value_dim).
    """
    value_dim, widest = value.shape[-1], max(query.shape[-1], value.shape[-1])
    query, key, value = (
        _pad_head_dim(x, widest).transpose(0, 2, 1, 3) for x in (query, key, value)
    )
    cache = layer_cache()
    if isinstance(cache, LayerCache):
        attn_out = attend_to_cache(cache, query, key, value, scoring, window, how)
        return attn_out[..., :value_dim].transpose(0, 2, 1, 3)
    if cache is not None:
        cache.record(key, window)
    if window is not None and window >= query.shape[1]:
        window = None
    if key.shape[2] == 1:  # the only KV head is replicated over the mesh
        key, value = (jnp.repeat(x, shards_of("kv_heads"), 2) for x in (key, value))
    attn_out = native.attend(query, key, value, scoring, window, remat, unroll, how)
    return attn_out[..., :value_dim].transpose(0, 2, 1, 3)


def _pad_head_dim(x: jax.Array, width: int) -> jax.Array:
    """Pad heads with zeros to a width, as values may be narrower than queries and keys."""
    missing = width - x.shape[-1]
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, missing))) if missing else x


def dense_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    scale: float | None = None,
    dropout_key: jax.Array | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """Compute dense attention; the softmax is in float32.

    The output is zero for a query that attends to no key.

    Args:
        query: (batch, heads, queries, head_dim); heads must be a multiple of kv_heads.
        key: (batch, kv_heads, keys, head_dim).
        value: (batch, kv_heads, keys, value_dim).
        mask: broadcastable to (batch, heads, queries, keys): bool, true where a query
            attends to a key, or floats to add to the attention scores.
        dropout: probability of dropping an attention weight.
        causal: whether query i attends to key j only for j <= i, counted from 0 as in PyTorch.
        scale: of the products; None: 1 / sqrt(head_dim).
        dropout_key: for dropout; None disables it.
        softcap: soft cap of attention scores.

    Raises:
        ValueError: kv_heads does not divide heads.

    Source: the definition at https://docs.pytorch.org/docs/stable/generated/
    torch.nn.functional.scaled_dot_product_attention.html
    """
    batch, heads, queries, head_dim = query.shape
    kv_heads, keys = key.shape[1:3]
    if heads % kv_heads:
        raise ValueError(
            f"the number of query heads, {heads}, is not a multiple of {kv_heads} key heads"
        )
    query = constrain(query, "batch", "heads", None, None)
    by_head = "kv_heads" if kv_heads > 1 else None  # the only KV head is replicated
    key, value = (constrain(x, "batch", by_head, None, None) for x in (key, value))
    groups = kv_heads, heads // kv_heads
    # h: key head, g: query head of its group, q and k: positions.
    products = dot(
        "bhgqd,bhkd->bhgqk", query.reshape(batch, *groups, queries, head_dim), key, jnp.float32
    )
    scores = soft_cap(products * (1 / math.sqrt(head_dim) if scale is None else scale), softcap)
    visible = jnp.tril(jnp.ones((queries, keys), bool)) if causal else None
    if mask is not None:
        grouped_mask = _group_mask(mask, groups)
        if grouped_mask.dtype == jnp.bool_:
            visible = _and_masks(visible, grouped_mask)
        else:
            scores = scores + grouped_mask
            # In an additive mask, a row of only minus infinity also means: attends to no key.
            visible = _and_masks(visible, scores > -jnp.inf)
    attn_weights = _softmax(scores, visible)
    if dropout and dropout_key is not None:
        keep_mask = jax.random.bernoulli(dropout_key, 1 - dropout, attn_weights.shape)
        attn_weights = jnp.where(keep_mask, attn_weights / (1 - dropout), 0)
    attn_out = dot("bhgqk,bhkd->bhgqd", attn_weights.astype(value.dtype), value)
    out = attn_out.reshape(batch, heads, queries, value.shape[-1])
    return constrain(out, "batch", "heads", None, None)


def _and_masks(mask: jax.Array | None, other_mask: jax.Array) -> jax.Array:
    return other_mask if mask is None else mask & other_mask


def _group_mask(mask: jax.Array, groups: tuple[int, int]) -> jax.Array:
    """Reshape a mask to (batch, kv_heads, group, queries, keys)."""
    mask_4d = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    if mask_4d.shape[1] == 1:
        return mask_4d[:, :, None]
    return mask_4d.reshape(mask_4d.shape[0], *groups, *mask_4d.shape[2:])


def _softmax(scores: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Compute a masked softmax over keys; fully masked rows give zeros, and no NaN gradients."""
    if mask is None:
        return jax.nn.softmax(scores, axis=-1)
    lowest = jnp.finfo(scores.dtype).min
    probs = jax.nn.softmax(jnp.where(mask, scores, lowest), axis=-1)
    return jnp.where(mask, probs, 0)
