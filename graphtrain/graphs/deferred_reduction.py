"""One reduction of gradients over `data` a step, hidden behind the last microbatch.

Until the last microbatch every copy of the model adds up gradients of its own sequences, and sends
nothing. In the last backward pass each layer's sum is reduced as soon as it is complete, while the
layers before it still compute. With ZeRO the reduction leaves each copy the piece that it updates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from lowering.tracing.constrain import by_hand, constrain_tree, placement, split_of
from lowering.tracing.deferred_gradient import Pending, vary
from lowering.trees import Tree, flatten, unflatten
from sharding_rules.arrays import ArraySpec
from sharding_rules.plan import layout

DATA = "data"

# (parameters, microbatch, its index) -> objective to differentiate, metrics to report
Objective = Callable[[Tree, Tree, Any], tuple[jax.Array, Tree]]


def can_defer() -> bool:
    """Whether there are copies of the model whose gradients are to be summed."""
    return DATA in split_of("batch")


def key_here(key: jax.Array) -> jax.Array:
    """A key of its own for each copy that works by hand; elsewhere one key makes all the bits."""
    found = placement()
    by_copy = found is not None and DATA in found.manual
    return jax.random.fold_in(key, jax.lax.axis_index(DATA)) if by_copy else key


def own_here(tree: Tree) -> Tree:
    """Arrays that are the same everywhere; as each copy's own, where copies work by hand."""
    found = placement()
    if found is None or DATA not in found.manual:
        return tree
    return jax.tree.map(lambda array: vary(array, DATA), tree)


def reduce_last(
    objective: Objective, parameters: Tree, specs: Tree, batch: Tree, microbatches: int
) -> tuple[Tree, Tree]:
    """Gradients and metrics of all microbatches; gradients rest where the optimizer's state does.

    Args:
        objective: of one microbatch and its index, to be summed over microbatches and sequences.
        parameters: arrays, the same on every copy.
        specs: their ArraySpecs.
        batch: arrays (microbatches, batch, ...).
    """
    found = placement()
    assert found is not None
    split_dimension = {path: _data_dimension(path, spec) for path, spec in flatten(specs).items()}

    def local(parameters: Tree, batch: Tree) -> tuple[Tree, Tree]:
        with by_hand((DATA,)):
            return _local(objective, parameters, specs, batch, microbatches, split_dimension)

    split = PartitionSpec(None, DATA)
    out = {
        path: PartitionSpec(*(None,) * (dimension or 0), DATA if dimension is not None else None)
        for path, dimension in split_dimension.items()
    }
    return jax.shard_map(
        local,
        mesh=found.current_mesh,
        in_specs=(jax.tree.map(lambda _: PartitionSpec(), parameters), split),
        out_specs=(unflatten(out), PartitionSpec()),
        axis_names={DATA},
    )(parameters, batch)


def _data_dimension(path: str, spec: ArraySpec) -> int | None:
    """The dimension that data splits of the optimizer's state of a parameter, if any."""
    found = placement()
    assert found is not None
    state = ArraySpec(spec.shape, spec.axes, spec.dtype, "optimizer")
    split = layout(f"optimizer/{path}", state, found.rules, found.shape).split
    return next((index for index, names in enumerate(split) if DATA in names), None)


def _local(
    objective: Objective,
    parameters: Tree,
    specs: Tree,
    batch: Tree,
    microbatches: int,
    split_dimension: dict[str, int | None],
) -> tuple[Tree, Tree]:
    """On one copy of the model: its own sequences, and its part of the reduction."""

    def of(parameters: Tree, index: Any) -> tuple[jax.Array, Tree]:
        return objective(parameters, jax.tree.map(lambda array: array[index], batch), index)

    own = jax.tree.map(lambda array: vary(array, DATA), parameters)
    differentiate = jax.value_and_grad(of, has_aux=True)

    def add(sums: Any, index: jax.Array) -> tuple[Any, None]:
        (_, metrics), gradients = differentiate(own, index)
        gradients = constrain_tree(gradients, specs, "gradient")
        return jax.tree.map(jnp.add, sums, (gradients, metrics)), None

    zeros = constrain_tree(jax.tree.map(jnp.zeros_like, own), specs, "gradient")
    start = zeros, {"loss": vary(jnp.zeros(()), DATA)}
    (sums, metrics), _ = jax.lax.scan(add, start, jnp.arange(microbatches - 1))
    flat_parameters, flat_sums = flatten(parameters), flatten(sums)

    def last(slots: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        pending = {
            path: _pending(array, flat_sums[path], slots[path], split_dimension[path])
            for path, array in flat_parameters.items()
        }
        return of(unflatten(pending), microbatches - 1)

    slots = {path: _slot(array, split_dimension[path]) for path, array in flat_parameters.items()}
    (_, last_metrics), gradients = jax.value_and_grad(last, has_aux=True)(slots)
    pieces = {
        path: replace(spec, shape=gradients[path].shape) for path, spec in flatten(specs).items()
    }
    placed = constrain_tree(unflatten(gradients), unflatten(pieces), "gradient")
    return placed, jax.lax.psum(jax.tree.map(jnp.add, metrics, last_metrics), DATA)


def _pending(
    weights: jax.Array, sums: jax.Array, slot: jax.Array, dimension: int | None
) -> Pending:
    from_the_end = None if dimension is None else dimension - weights.ndim
    return Pending(weights, sums, slot, DATA, from_the_end)


def _slot(weights: jax.Array, dimension: int | None) -> jax.Array:
    """Zeros in the shape in which this copy gets the gradient."""
    if dimension is None:
        return jnp.zeros_like(weights)
    shape = list(weights.shape)
    shape[dimension] //= jax.lax.axis_size(DATA)
    return vary(jnp.zeros(shape, weights.dtype), DATA)
