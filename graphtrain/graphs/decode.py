"""Graphs of generation with a KV cache: prefill (many tokens at once) and decode (one token)."""

from __future__ import annotations

import jax

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.graphs.dispatch import decode_step, kv_cache_specs, parameter_specs
from lowering.graph import Graph
from lowering.trees import Tree
from sharding_rules.arrays import ArraySpec

TOKENS_PER_CALL = {"prefill": 64, "decode": 1}  # tokens per call of each graph


def generation_graph(program: ResolvedProgram, name: str) -> Graph:
    """Build a graph by its name in TOKENS_PER_CALL; its longest sequence is program.batch.seq_len.

    The tokens of a prefill call may end in padding. Keys and values of padding do no harm: no later
    query sees their positions before they are overwritten.
    """
    model, batch, count = program.model, program.batch.global_batch_size, TOKENS_PER_CALL[name]
    longest = -(-program.batch.seq_len // TOKENS_PER_CALL["prefill"]) * TOKENS_PER_CALL["prefill"]
    kept = kv_cache_specs(model, batch, longest)

    def step(parameters: Tree, kept: Tree, tokens: jax.Array, begin: jax.Array) -> Tree:
        scores, kept = decode_step(model, parameters, kept, tokens, begin)
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
