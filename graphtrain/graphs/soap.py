"""SOAP: Adam in the eigenbasis of Shampoo's preconditioners; what is no matrix by AdamW.

All of it is done where whole matrices are. An all-to-all exchanges shards for whole matrices, with
their preconditioners and bases, and a second one brings them back (`whole_matrices`): so a basis is
computed by one device, and none is gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from graphtrain.config.schema import Optimizer
from graphtrain.graphs.eigenbasis import update_matrices
from graphtrain.graphs.whole_matrices import (
    average,
    divide,
    give_back_matrices,
    groups_of,
    partition,
    split_of,
    take_matrices,
)
from graphtrain.models.matrices import SOAP_SCOPE, MatrixGroup, is_hidden_matrix
from graphtrain.models.optimizer_state import soap_squares
from graphtrain.models.preconditioners import square_group
from lowering.tracing.constrain import on_each_device
from lowering.trees import unflatten
from sharding_rules.arrays import ArraySpec

Arrays = dict[str, jax.Array]
Specs = Mapping[str, ArraySpec]


def scale_by_soap(optimizer: Optimizer, parameters: Specs) -> optax.GradientTransformation:
    """Build SOAP for the matrices of the layers, and Adam for all other parameters.

    The first step only begins the preconditioners: it does not change the matrices.

    Args:
        optimizer: Settings.
        parameters: ArraySpecs of the parameters, by path.

    Source: Vyas et al. 2024, https://arxiv.org/abs/2409.11321, algorithm 3, and the authors'
    https://github.com/nikhilvyas/SOAP for the first step and the order of eigenvectors
    """
    matrices = {path: spec for path, spec in parameters.items() if is_hidden_matrix(spec)}
    squares = _squares(matrices, optimizer)
    adam = optax.scale_by_adam(optimizer.beta1, optimizer.beta2, optimizer.epsilon)

    def init(params: Any) -> Any:  # optax's names
        of_matrices, others = divide(params, matrices)
        zeros = {
            part: {path: jnp.zeros(spec.shape) for path, spec in specs.items()}
            for part, specs in squares.items()
        }
        return {
            "count": jnp.zeros((), jnp.int32),
            "mu": {path: jnp.zeros_like(one) for path, one in of_matrices.items()},
            "nu": {path: jnp.zeros_like(one) for path, one in of_matrices.items()},
            **zeros,
            "adam": adam.init(others),
        }

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        gradients, others = divide(updates, matrices)
        count = state["count"]
        momenta = {
            path: jnp.where(count > 0, average(state["mu"][path], gradient, optimizer.beta1), 0.0)
            for path, gradient in gradients.items()
        }
        arrays = {"gradient": gradients, "mu": momenta, "nu": state["nu"]}
        arrays |= {part: state[part] for part in squares}
        results = _on_whole_matrices(count, arrays, matrices, squares, optimizer)
        directions = results.pop("gradient")
        by_adam: Any
        by_adam, adam_state = adam.update(others, state["adam"])
        return unflatten(directions | by_adam), {
            "count": count + 1,
            "mu": momenta,
            **results,
            "adam": adam_state,
        }

    return optax.GradientTransformation(init, update)


def _squares(matrices: Specs, optimizer: Optimizer) -> dict[str, dict[str, ArraySpec]]:
    """Return the ArraySpecs of preconditioners and their bases, by part of the state and path."""
    parts: dict[str, dict[str, ArraySpec]] = {}
    for path, spec in matrices.items():
        for part, square in soap_squares(spec, optimizer).items():
            parts.setdefault(part, {})[path] = square
    return parts


@dataclass(frozen=True)
class _Exchange:
    """One array for each matrix of a group, which moves with it to one device and back."""

    part: str  # of the state, or "gradient", which comes back as the direction
    group: MatrixGroup
    splits: tuple[PartitionSpec, ...]


def _on_whole_matrices(
    count: jax.Array,
    arrays: Mapping[str, Arrays],
    matrices: Specs,
    squares: Mapping[str, Specs],
    optimizer: Optimizer,
) -> dict[str, Arrays]:
    """Return directions, as "gradient", and the new state of all matrices, by part and path.

    Momenta are sent, and do not come back: they are no other ones.
    """
    results: dict[str, Arrays] = {part: {} for part in arrays if part != "mu"}
    for group in groups_of(matrices):
        exchanges = list(_exchanges(group, matrices, squares))
        returned = [one for one in exchanges if one.part != "mu"]

        def update_shards(
            count: jax.Array,
            *shards: tuple[jax.Array, ...],
            exchanges: list[_Exchange] = exchanges,
            row_dimensions: int = group.row_dimensions,
        ) -> tuple[tuple[jax.Array, ...], ...]:
            pairs = list(zip(exchanges, shards, strict=True))
            whole = {one.part: take_matrices(each, one.group) for one, each in pairs}
            updated = update_matrices(count, whole, row_dimensions, optimizer)
            return tuple(
                give_back_matrices(updated[one.part], each, one.group)
                for one, each in pairs
                if one.part in updated
            )

        given = [tuple(arrays[one.part][path] for path in group.axes) for one in exchanges]
        inputs: Any = [PartitionSpec(), *(one.splits for one in exchanges)]
        outputs: Any = tuple(one.splits for one in returned)
        with jax.named_scope(SOAP_SCOPE):
            updated = on_each_device(update_shards, inputs, outputs)(count, *given)
        for one, shards in zip(returned, updated, strict=True):
            results[one.part] |= dict(zip(group.axes, shards, strict=True))
    return results


def _exchanges(
    group: MatrixGroup, matrices: Specs, squares: Mapping[str, Specs]
) -> Iterator[_Exchange]:
    """Yield the arrays of a group, with the moves that bring each to the device of its matrix."""
    splits = tuple(partition(path, matrices[path]) for path in group.axes)
    for part in ("gradient", "mu", "nu"):
        yield _Exchange(part, group, splits)
    for part, specs in squares.items():
        if set(group.axes) <= specs.keys():  # else this side is too long
            paths = {path: f"{part}/{path}" for path in group.axes}
            of_squares = tuple(partition(paths[path], specs[path]) for path in paths)
            first = next(iter(paths))
            split = split_of(paths[first], specs[first])
            yield _Exchange(part, square_group(group, specs, split), of_squares)
