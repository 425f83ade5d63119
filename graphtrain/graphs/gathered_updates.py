"""Gather the updated weights of stacked layers one layer after another, into the stored weights.

See graphtrain.models.updated_weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import jax

from graphtrain.models.updated_weights import UPDATE_SCOPE
from lowering.tracing.constrain import constrain_tree
from lowering.tracing.weight_layout import in_row_major
from lowering.trees import Tree, flatten, unflatten
from sharding_rules.arrays import ArraySpec

Arrays = dict[str, jax.Array]


def gather_layers(stored: Tree, updated: Tree, specs: Mapping[str, ArraySpec]) -> Tree:
    """Return updated weights, of which those of some stacks are sharded as they are stored.

    Args:
        stored: Weights before the update, which are not read afterwards.
        updated: Weights after it, in the sharding of the optimizer state.
        specs: ArraySpecs of `models.updated_weights.gathered_by_layer`, by path.
    """
    old, new = flatten(stored), flatten(updated)
    by_stack: dict[tuple[str | None, int], dict[str, ArraySpec]] = {}
    for path, spec in specs.items():
        by_stack.setdefault((spec.axes[0], spec.shape[0]), {})[path] = spec
    with jax.named_scope(UPDATE_SCOPE):
        for of_stack in by_stack.values():
            new |= _gather_stack(old, new, of_stack)
    return unflatten(new)


def _gather_stack(old: Arrays, new: Arrays, specs: Mapping[str, ArraySpec]) -> Arrays:
    """Return the arrays of one stack, gathered layer by layer."""
    of_layer = {
        path: replace(spec, shape=spec.shape[1:], axes=spec.axes[1:])
        for path, spec in specs.items()
    }
    tree = unflatten(of_layer)

    def gather_layer(row: jax.Array, weights: Arrays) -> Arrays:
        shards = {path: jax.lax.dynamic_index_in_dim(new[path], row, 0, False) for path in weights}
        placed = constrain_tree(unflatten(shards), tree, "optimizer")
        layer = flatten(constrain_tree(placed, tree, "parameter"))
        # XLA:GPU gathers along the slowest dimension. It would transpose the stack for that.
        rows = {path: in_row_major(layer[path], path, of_layer[path]) for path in weights}
        return {
            path: jax.lax.dynamic_update_index_in_dim(stack, rows[path], row, 0)
            for path, stack in weights.items()
        }

    layers = next(iter(specs.values())).shape[0]
    return jax.lax.fori_loop(0, layers, gather_layer, {path: old[path] for path in specs})
