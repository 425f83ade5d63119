"""The graphs that continue a sequence: many tokens at once, and one at a time."""

from __future__ import annotations

import jax

from graphtrain.config.schema import Program
from graphtrain.graphs.dispatch import extend, kept_specs, parameter_specs
from lowering.graph import Graph
from lowering.trees import Tree
from sharding_rules.arrays import ArraySpec

TOKENS = {"prefill": 64, "decode": 1}  # that a graph takes at once


def extend_graph(program: Program, name: str) -> Graph:
    """A graph by its name in TOKENS; its longest sequence is program.batch.length.

    Tokens of a prompt that fill up prefill's number do no harm: what they leave among keys and
    values is ahead of every later query until it is written over.
    """
    model, batch, count = program.model, program.batch.sequences, TOKENS[name]
    longest = -(-program.batch.length // TOKENS["prefill"]) * TOKENS["prefill"]
    kept = kept_specs(model, batch, longest)

    def step(parameters: Tree, kept: Tree, tokens: jax.Array, begin: jax.Array) -> Tree:
        scores, kept = extend(model, parameters, kept, tokens, begin)
        return {"kept": kept, "scores": scores}

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
