"""Prefill and decode of the native decoder: continue sequences with a KV cache."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from graphtrain.config.schema import Model
from graphtrain.models.attention.cache_layout import CachedLayer
from graphtrain.models.attention.kv_cache import CacheRows, continue_rows, use_cache
from graphtrain.models.block import Block, has_global_attention
from graphtrain.models.decoder import Decoder, Parameters, merge
from graphtrain.models.shapes import STACKS
from lowering.trees import Tree

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphtrain.models.protocol import LogitsReader


def cached_layers(model: Model) -> dict[str, CachedLayer]:
    """Return the layers whose keys and values are cached, by name."""
    assert model.kv_heads and model.head_dim
    if (latent := model.latent_attention) is not None:
        width = latent.qk_rope_head_dim + latent.kv_lora_rank
        layer = CachedLayer(1, width, value_dim=latent.kv_lora_rank)
        return {f"{index:03}": layer for index in range(model.depth)}
    return {
        f"{index:03}": CachedLayer(
            model.kv_heads,
            model.head_dim,
            None if _is_global(model, index) else model.sliding_window,
        )
        for index in range(model.depth)
    }


def _is_global(model: Model, index: int) -> bool | None:
    """Return whether a layer has global attention; None if all layers are alike."""
    return has_global_attention(model, index) if model.global_attention_every else None


def decode_step(
    model: Model,
    parameters: Parameters,
    kv_cache: Tree,
    tokens: jax.Array,
    rows: CacheRows,
    last: jax.Array | None = None,
    read: LogitsReader | None = None,
) -> tuple[Any, Tree]:
    """Return the logits (batch, seq, vocab) of new tokens, and the updated KV cache.

    Layers are written out, not scanned: a scan would copy the weights and the cache of each layer.

    Args:
        model: Settings.
        parameters: Weights, those of the layers as tuples of arrays.
        kv_cache: KV cache of the earlier tokens: {"key", "value"} by the names of cached_layers.
        tokens: Ids of the new tokens (batch, seq).
        rows: Slots and offsets of the batch.
        last: Index of the only token whose logits are returned, a scalar.
        read: Returns what is returned in place of the logits.
    """
    others = {name: tree for name, tree in parameters.items() if name not in STACKS}
    decoder, updated = merge(model, others), {}
    with continue_rows(rows):
        x = decoder.embed(tokens, None)
        for index, (name, layer) in enumerate(kv_cache.items()):
            with use_cache(**layer) as cache:
                block = _block(decoder, parameters, index)
                x, _ = block(x, None, _is_global(model, index))
            updated[name] = {"key": cache.key, "value": cache.value}

    def logits_at(indices: jax.Array) -> jax.Array:
        chosen = jnp.take_along_axis(x, indices[..., None], 1)
        return decoder.unembed(decoder.final_norm(chosen))

    if read is not None:
        return read(logits_at), updated
    if last is not None:
        x = jax.lax.dynamic_slice_in_dim(x, last, 1, 1)
    return decoder.unembed(decoder.final_norm(x)), updated


def _block(decoder: Decoder, parameters: Parameters, index: int) -> Block:
    """Return the block of the layer with an index, dense layers before those of a mixture first."""
    dense = decoder.model.dense_layers
    stack, row = ("dense_layers", index) if index < dense else ("layers", index - dense)
    weights = jax.tree.map(
        lambda arrays: arrays[row],
        parameters[stack],
        is_leaf=lambda node: isinstance(node, tuple),
    )
    block, _ = nnx.split(getattr(decoder, stack))
    return nnx.merge(block, nnx.State(weights))


def decode_step_in_loop(
    model: Model,
    parameters: Parameters,
    select_layer: Callable[[jax.Array], Tree],
    kv_cache: Tree,
    tokens: jax.Array,
    rows: CacheRows,
    last: jax.Array,
) -> tuple[jax.Array, Tree]:
    """Return what `decode_step` does for one slot, by a program that does not grow with depth.

    Each call copies the weights and the slot's KV cache layer by layer.

    Args:
        model: Settings; all layers have the same attention.
        parameters: Weights; those of the layers are not used.
        select_layer: Returns the weights of the layer with an index.
        kv_cache: As for `decode_step`.
        tokens: Ids of the new tokens (1, seq).
        rows: Slot and offset.
        last: Index of the only token whose logits are returned, a scalar.
    """
    slot = rows.slot
    assert slot is not None and model.global_attention_every is None
    decoder = merge(model, {name: tree for name, tree in parameters.items() if name != "layers"})
    block, _ = nnx.split(decoder.layers)
    dims = {name: getattr(rows.layout, name).index("b") for name in ("key", "value")}

    def read_slot(cache: Tree) -> Tree:
        return {
            name: jax.lax.dynamic_slice_in_dim(array, slot, 1, dims[name])
            for name, array in cache.items()
        }

    def layer(x: jax.Array, index: jax.Array) -> tuple[jax.Array, Tree]:
        caches = [partial(read_slot, cache) for cache in kv_cache.values()]
        with use_cache(**jax.lax.switch(index, caches)) as cache:
            x, _ = nnx.merge(block, nnx.State(select_layer(index)))(x, None, None)
        return x, {"key": cache.key, "value": cache.value}

    with continue_rows(rows):
        x = decoder.embed(tokens, None)
    with continue_rows(replace(rows, slot=jnp.int32(0))):  # of the cache that is read
        x, read = jax.lax.scan(layer, x, jnp.arange(model.layers))
    updated = {
        name: {
            entry: jax.lax.dynamic_update_slice_in_dim(array, read[entry][row], slot, dims[entry])
            for entry, array in cache.items()
        }
        for row, (name, cache) in enumerate(kv_cache.items())
    }
    x = jax.lax.dynamic_slice_in_dim(x, last, 1, 1)
    return decoder.unembed(decoder.final_norm(x)), updated
