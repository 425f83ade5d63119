"""Graphs of generation with a KV cache: prefill (many tokens at once) and decode (one token)."""

from __future__ import annotations

import jax

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.graphs.open_model import open_language_model
from lowering.graph import Graph
from lowering.trees import Tree
from sharding_rules.arrays import ArraySpec

TOKENS_PER_CALL = {"prefill": 64, "decode": 1}  # tokens per call of each graph, at most


def generation_graph(program: ResolvedProgram, name: str) -> Graph:
    """Build a graph by its name in TOKENS_PER_CALL; its longest sequence is program.batch.seq_len.

    The tokens of a prefill call may end in padding. Keys and values of padding do no harm: no later
    query sees their positions before they are overwritten.
    """
    model = open_language_model(program.model)
    batch, seq_len = program.batch.global_batch_size, program.batch.seq_len
    # A call with more tokens than the context would need learned positions that do not exist.
    counts = {graph: min(count, seq_len) for graph, count in TOKENS_PER_CALL.items()}
    count, longest = counts[name], -(-seq_len // counts["prefill"]) * counts["prefill"]
    kept = model.kv_cache_specs(batch, longest)

    def step(parameters: Tree, kept: Tree, tokens: jax.Array, begin: jax.Array) -> Tree:
        scores, kept = model.decode_step(parameters, kept, tokens, begin)
        return {"kept": kept, "scores": scores}

    inputs = {
        "parameters": model.specs(),
        "kept": kept,
        "tokens": ArraySpec((batch, count), ("batch", "seq"), "int32", "activation"),
        "begin": ArraySpec((), (), "int32", "activation"),
    }
    scores = (batch, count, program.model.vocab)
    outputs = {
        "kept": kept,
        "scores": ArraySpec(scores, ("batch", "seq", "vocab"), "float32", "activation"),
    }
    return Graph(name, step, inputs, outputs, donated=("kept",))
