"""The decoder where it continues a sequence, of which keys and values are kept."""

from __future__ import annotations

import jax
from flax import nnx

from graphtrain.config.schema import Model
from graphtrain.models.attention.kv_cache import beginning, keeping
from graphtrain.models.block import Block, full_layers
from graphtrain.models.decoder import Parameters, merge
from lowering.tracing.deferred_gradient import complete
from lowering.trees import Tree
from sharding_rules.arrays import ArraySpec


def kept_specs(model: Model, sequences: int, longest: int) -> Tree:
    """Keys and values of all layers, of so many sequences of so many tokens."""
    assert model.kv_heads and model.head_dim
    shape = (model.layers, sequences, longest, model.kv_heads, model.head_dim)
    axes = ("layers", "batch", None, "kv_heads", "head_dim")
    return dict.fromkeys(("key", "value"), ArraySpec(shape, axes, model.dtype, "activation"))


def extend(
    model: Model, parameters: Parameters, kept: Tree, tokens: jax.Array, begin: jax.Array
) -> tuple[jax.Array, Tree]:
    """Scores of every next token, and what is kept then.

    Args:
        model: Settings.
        parameters: Weights.
        kept: Keys and values of the tokens before, as kept_specs has them.
        tokens: (batch, seq), those that follow.
        begin: The position of the first.
    """
    decoder = merge(model, parameters)
    with beginning(begin):
        x, kept = _extend_layers(model, decoder.layers, decoder.embed(tokens, None), kept)
    return decoder.unembed(decoder.final_norm(x)), kept


def _extend_layers(model: Model, layers: Block, x: jax.Array, kept: Tree) -> tuple[jax.Array, Tree]:
    block, parameters = nnx.split(layers)

    def one_layer(x: jax.Array, layer: tuple) -> tuple[jax.Array, Tree]:
        parameters, key, value, full = layer
        with keeping(key, value) as here:
            x, _ = nnx.merge(block, complete(parameters))(x, None, full)
        return x, {"key": here.key, "value": here.value}

    return jax.lax.scan(one_layer, x, (parameters, kept["key"], kept["value"], full_layers(model)))
