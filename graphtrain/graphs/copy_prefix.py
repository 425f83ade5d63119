"""Graph that copies the KV cache of a slot to another one."""

from __future__ import annotations

import jax

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.graphs.served_model import scalar, state_specs
from lowering.graph import Graph
from lowering.trees import Tree
from sharding_rules.arrays import ArraySpec


def copy_prefix_graph(program: ResolvedProgram) -> Graph:
    """Build the graph; the slot that is copied to is not active after it."""

    def copy_prefix(state: Tree, source: jax.Array, destination: jax.Array) -> Tree:
        def copy(array: jax.Array, spec: ArraySpec) -> jax.Array:
            slots = spec.axes.index("batch")
            row = jax.lax.dynamic_slice_in_dim(array, source, 1, slots)
            return jax.lax.dynamic_update_slice_in_dim(array, row, destination, slots)

        like = specs["state"]
        sequences = state["sequences"]
        stopped = sequences["active"].at[destination].set(0)
        positions = sequences["position"]
        return {
            "state": {
                "kv_cache": jax.tree.map(copy, state["kv_cache"], like["kv_cache"]),
                "sequences": sequences
                | {
                    "active": stopped,
                    "position": copy(positions, like["sequences"]["position"]),
                },
            }
        }

    specs = {"state": state_specs(program)}
    inputs = specs | dict.fromkeys(("source", "destination"), scalar("int32"))
    return Graph("copy_prefix", copy_prefix, inputs, specs, donated=("state",))
