"""Graph of beam search: the most likely tokens after each beam, whose KV cache is its parent's.

Which candidates become beams is decided on the host, see `run.serving.beam_search`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.serving_program import batch_shards
from graphtrain.graphs.served_model import (
    continued_rows,
    decode_step,
    scalar,
    state_specs,
    weight_specs,
)
from lowering.graph import Graph
from lowering.trees import Tree
from sharding_rules.arrays import ArraySpec


def decode_beams_graph(program: ResolvedProgram) -> Graph:
    """Build the graph that processes one token of each beam; beam i is in slot i.

    Its inputs beside weights and state: `parents`, the slot whose KV cache a beam continues;
    `tokens`, the next one of each beam; their `position`; and `choosable`, the number of tokens
    that may follow. On a mesh that shards the batch, all slots are computed.
    """
    serve, vocab, specs = program.settings.serve, program.model.vocab, state_specs(program)
    rows = serve.beams if batch_shards(program) == 1 else serve.slots
    # As many as can be chosen next, if each beam may end with one of its candidates.
    count = min(2 * serve.beams, vocab)

    def decode_beams(
        weights: Tree,
        state: Tree,
        parents: jax.Array,
        tokens: jax.Array,
        position: jax.Array,
        choosable: jax.Array,
    ) -> Tree:
        def inherit(array: jax.Array, spec: ArraySpec) -> jax.Array:
            return jnp.take(array, parents, axis=spec.axes.index("batch"), mode="clip")

        def update(array: jax.Array, beams: jax.Array, spec: ArraySpec) -> jax.Array:
            slots = spec.axes.index("batch")
            return jax.lax.dynamic_update_slice_in_dim(array, beams, 0, slots)

        inherited = jax.tree.map(inherit, state["kv_cache"], specs["kv_cache"])
        cache_rows = continued_rows(program, jnp.full(rows, position))
        logits, kv_cache = decode_step(program, weights, inherited, tokens[:, None], cache_rows)
        logits = jnp.where(jnp.arange(vocab) < choosable, logits[:, 0], -jnp.inf)
        log_probs, candidates = jax.lax.top_k(jax.nn.log_softmax(logits), count)
        kv_cache = jax.tree.map(update, state["kv_cache"], kv_cache, specs["kv_cache"])
        return {
            "state": state | {"kv_cache": kv_cache},
            "candidates": {"token": candidates, "log_prob": log_probs},
        }

    by_beam = ArraySpec((rows,), ("batch",), "int32", "activation")
    inputs = {
        "weights": weight_specs(program),
        "state": specs,
        **dict.fromkeys(("parents", "tokens"), by_beam),
        **dict.fromkeys(("position", "choosable"), scalar("int32")),
    }
    candidates = {
        name: ArraySpec((rows, count), ("batch", None), dtype, "activation")
        for name, dtype in {"token": "int32", "log_prob": "float32"}.items()
    }
    outputs = {"state": specs, "candidates": candidates}
    return Graph(
        "decode_beams", decode_beams, inputs, outputs, donated=("state",), has_few_rows=True
    )
