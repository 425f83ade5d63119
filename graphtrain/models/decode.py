"""Prefill and decode of the native decoder: continue sequences with a KV cache."""

from __future__ import annotations

import jax
from flax import nnx

from graphtrain.config.schema import Model
from graphtrain.models.attention.kv_cache import at_cache_offset, use_cache
from graphtrain.models.block import Block, global_attention_layers
from graphtrain.models.decoder import Parameters, merge
from lowering.tracing.deferred_gradient import attach_reductions
from lowering.trees import Tree
from sharding_rules.arrays import ArraySpec


def kv_cache_specs(model: Model, sequences: int, max_seq_len: int) -> Tree:
    """Return the ArraySpecs of a KV cache for `sequences` sequences of up to `longest` tokens.

    Keys and values are each (layers, batch, longest, kv_heads, head_dim).
    """
    assert model.kv_heads and model.head_dim
    shape = (model.layers, sequences, max_seq_len, model.kv_heads, model.head_dim)
    axes = ("layers", "batch", None, "kv_heads", "head_dim")
    return dict.fromkeys(("key", "value"), ArraySpec(shape, axes, model.dtype, "activation"))


def decode_step(
    model: Model, parameters: Parameters, kv_cache: Tree, tokens: jax.Array, offset: jax.Array
) -> tuple[jax.Array, Tree]:
    """Return the logits (batch, seq, vocab) of new tokens, and the updated KV cache.

    Args:
        model: Settings.
        parameters: Weights.
        kv_cache: KV cache of the earlier tokens, as in kv_cache_specs.
        tokens: Ids of the new tokens (batch, seq).
        offset: Cache offset: the position of the first new token.
    """
    decoder = merge(model, parameters)
    with at_cache_offset(offset):
        x, kv_cache = _decode_layers(model, decoder.layers, decoder.embed(tokens, None), kv_cache)
    return decoder.unembed(decoder.final_norm(x)), kv_cache


def _decode_layers(
    model: Model, layers: Block, x: jax.Array, cache: Tree
) -> tuple[jax.Array, Tree]:
    block, parameters = nnx.split(layers)

    def one_layer(x: jax.Array, layer: tuple) -> tuple[jax.Array, Tree]:
        parameters, key, value, full = layer
        with use_cache(key, value) as layer_cache:
            x, _ = nnx.merge(block, attach_reductions(parameters))(x, None, full)
        return x, {"key": layer_cache.key, "value": layer_cache.value}

    return jax.lax.scan(
        one_layer, x, (parameters, cache["key"], cache["value"], global_attention_layers(model))
    )
