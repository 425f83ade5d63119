"""The graphs that continue a sequence: many tokens at once, and one at a time."""

from __future__ import annotations

import jax
from flax import nnx

from graphtrain.config.schema import Model, Program
from graphtrain.models.decoder import Parameters, merge, parameter_specs
from graphtrain.models.kept import beginning, keeping
from graphtrain.models.layers import Block, full_layers
from lowering.graph import Graph
from lowering.pending import complete
from lowering.trees import Tree
from sharding_rules.arrays import ArraySpec

TOKENS = {"prefill": 64, "decode": 1}  # that a graph takes at once


def extend_graph(program: Program, name: str) -> Graph:
    """A graph by its name in TOKENS; its longest sequence is program.batch.length.

    Tokens of a prompt that fill up prefill's number do no harm: what they leave among keys and
    values is ahead of every later query until it is written over.
    """
    model, count = program.model, TOKENS[name]
    kept = kept_specs(program)

    def step(parameters: Tree, kept: Tree, tokens: jax.Array, begin: jax.Array) -> Tree:
        scores, kept = extend(model, parameters, kept, tokens, begin)
        return {"kept": kept, "scores": scores}

    batch = program.batch.sequences
    inputs = {
        "parameters": parameter_specs(model),
        "kept": kept,
        "tokens": ArraySpec((batch, count), ("batch", "seq"), "int32", "activation"),
        "begin": ArraySpec((), (), "int32", "activation"),
    }
    scores = (batch, count, model.vocab)
    outputs = {
        "kept": kept,
        "scores": ArraySpec(scores, ("batch", "seq", "vocab"), "float32", "activation"),
    }
    return Graph(name, step, inputs, outputs, donated=("kept",))


def kept_specs(program: Program) -> Tree:
    """Keys and values of all layers; their length is a multiple of what prefill takes."""
    model = program.model
    assert model.kv_heads and model.head_dim
    longest = -(-program.batch.length // TOKENS["prefill"]) * TOKENS["prefill"]
    shape = (model.layers, program.batch.sequences, longest, model.kv_heads, model.head_dim)
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
