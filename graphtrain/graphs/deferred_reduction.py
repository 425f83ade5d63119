"""Deferred gradient reduction: gradients are reduced over `data` once per step.

During gradient accumulation every data-parallel replica sums the gradients of its own sequences,
without communication. In the backward pass of the last microbatch each layer's sum is reduced as
soon as it is complete, while the layers before it still compute. With ZeRO the reduction leaves
each replica the shard that it updates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from lowering.tracing.constrain import constrain_tree, manual_axes, mesh_axes_of, placement
from lowering.tracing.deferred_gradient import DeferredGradient, as_varying
from lowering.trees import Tree, flatten, unflatten
from sharding_rules.arrays import ArraySpec
from sharding_rules.plan import make_layout

DATA = "data"

# (parameters, microbatch, its index) -> (objective to differentiate, metrics to report)
Objective = Callable[[Tree, Tree, Any], tuple[jax.Array, Tree]]


def can_defer() -> bool:
    """Return whether there are data-parallel replicas whose gradients have to be reduced."""
    return DATA in mesh_axes_of("batch")


def replica_key(key: jax.Array) -> jax.Array:
    """Return a random key of each replica's own inside the shard_map over `data`, else `key`."""
    context = placement()
    is_per_replica = context is not None and DATA in context.manual
    return jax.random.fold_in(key, jax.lax.axis_index(DATA)) if is_per_replica else key


def vary_tree(tree: Tree) -> Tree:
    """Mark replicated arrays as each replica's own inside the shard_map over `data`."""
    context = placement()
    if context is None or DATA not in context.manual:
        return tree
    return jax.tree.map(lambda array: as_varying(array, DATA), tree)


def accumulate_then_reduce(
    objective: Objective, parameters: Tree, specs: Tree, batch: Tree, microbatches: int
) -> tuple[Tree, Tree]:
    """Return gradients and metrics of all microbatches, after one reduction over `data`.

    Gradients have the sharding of the optimizer state.

    Args:
        objective: Objective of a microbatch, to be summed over microbatches and sequences.
        parameters: Arrays, replicated over `data`.
        specs: ArraySpecs of the parameters.
        batch: Arrays (microbatches, batch, ...).
        microbatches: Number of microbatches.
    """
    context = placement()
    assert context is not None
    split_dimension = {path: _data_dimension(path, spec) for path, spec in flatten(specs).items()}

    def replica_gradients(parameters: Tree, batch: Tree) -> tuple[Tree, Tree]:
        with manual_axes((DATA,)):
            return _accumulate_replica(
                objective, parameters, specs, batch, microbatches, split_dimension
            )

    split = PartitionSpec(None, DATA)
    out = {
        path: PartitionSpec(*(None,) * (dimension or 0), DATA if dimension is not None else None)
        for path, dimension in split_dimension.items()
    }
    return jax.shard_map(
        replica_gradients,
        mesh=context.current_mesh,
        in_specs=(jax.tree.map(lambda _: PartitionSpec(), parameters), split),
        out_specs=(unflatten(out), PartitionSpec()),
        axis_names={DATA},
    )(parameters, batch)


def _data_dimension(path: str, spec: ArraySpec) -> int | None:
    """Return the dimension in which `data` shards a parameter's optimizer state, if any."""
    context = placement()
    assert context is not None
    state = ArraySpec(spec.shape, spec.axes, spec.dtype, "optimizer")
    split = make_layout(f"optimizer/{path}", state, context.rules, context.shape).split
    return next((index for index, names in enumerate(split) if DATA in names), None)


def _accumulate_replica(
    objective: Objective,
    parameters: Tree,
    specs: Tree,
    batch: Tree,
    microbatches: int,
    split_dimension: dict[str, int | None],
) -> tuple[Tree, Tree]:
    """Accumulate one replica's gradients and reduce them during the last backward pass."""

    def objective_at(parameters: Tree, index: Any) -> tuple[jax.Array, Tree]:
        return objective(parameters, jax.tree.map(lambda array: array[index], batch), index)

    varying_parameters = jax.tree.map(lambda array: as_varying(array, DATA), parameters)
    differentiate = jax.value_and_grad(objective_at, has_aux=True)

    def add(sums: Any, index: jax.Array) -> tuple[Any, None]:
        (_, metrics), gradients = differentiate(varying_parameters, index)
        gradients = constrain_tree(gradients, specs, "gradient")
        return jax.tree.map(jnp.add, sums, (gradients, metrics)), None

    zeros = constrain_tree(jax.tree.map(jnp.zeros_like, varying_parameters), specs, "gradient")
    start = zeros, {"loss": as_varying(jnp.zeros(()), DATA)}
    (sums, metrics), _ = jax.lax.scan(add, start, jnp.arange(microbatches - 1))
    flat_parameters, flat_sums = flatten(parameters), flatten(sums)

    def last(slots: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        pending = {
            path: _deferred(array, flat_sums[path], slots[path], split_dimension[path])
            for path, array in flat_parameters.items()
        }
        return objective_at(unflatten(pending), microbatches - 1)

    slots = {
        path: _gradient_slot(array, split_dimension[path])
        for path, array in flat_parameters.items()
    }
    (_, last_metrics), gradients = jax.value_and_grad(last, has_aux=True)(slots)
    sharded_specs = {
        path: replace(spec, shape=gradients[path].shape) for path, spec in flatten(specs).items()
    }
    reduced = constrain_tree(unflatten(gradients), unflatten(sharded_specs), "gradient")
    return reduced, jax.lax.psum(jax.tree.map(jnp.add, metrics, last_metrics), DATA)


def _deferred(
    weights: jax.Array, sums: jax.Array, slot: jax.Array, dimension: int | None
) -> DeferredGradient:
    negative_dimension = None if dimension is None else dimension - weights.ndim
    return DeferredGradient(weights, sums, slot, DATA, negative_dimension)


def _gradient_slot(weights: jax.Array, dimension: int | None) -> jax.Array:
    """Return zeros in the shape of the gradient's shard on this replica."""
    if dimension is None:
        return jnp.zeros_like(weights)
    shape = list(weights.shape)
    shape[dimension] //= jax.lax.axis_size(DATA)
    return as_varying(jnp.zeros(shape, weights.dtype), DATA)
