"""Norms of parameters and of their updates, by group of arrays: metrics that a run may ask for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import optax

from graphtrain.config.schema import Optimizer
from lowering.trees import Tree, flatten

PARAMETER_NORM, UPDATE_NORM = "parameter_norm", "update_norm"


def group_norms(optimizer: Optimizer, parameters: Tree, updates: Tree) -> dict[str, jax.Array]:
    """Return the norm of the parameters and of the updates of each group, by metric name.

    Empty unless `optimizer.group_norms` is set.

    Args:
        optimizer: Settings.
        parameters: Parameters before the update.
        updates: What is added to them.
    """
    if not optimizer.group_norms:
        return {}
    trees = {PARAMETER_NORM: parameters, UPDATE_NORM: updates}
    return {
        f"{name}.{group}": optax.tree.norm(arrays)
        for name, tree in trees.items()
        for group, arrays in _groups(flatten(tree)).items()
    }


def group_norm_names(optimizer: Optimizer, parameters: Tree) -> list[str]:
    """Return the names of `group_norms`, by the ArraySpecs of the parameters."""
    if not optimizer.group_norms:
        return []
    groups = _groups(flatten(parameters))
    return [f"{name}.{group}" for name in (PARAMETER_NORM, UPDATE_NORM) for group in groups]


def _groups(arrays: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return arrays by the module that they are in; numbers of layers are no part of its name."""
    groups: dict[str, list[Any]] = {}
    for path, array in arrays.items():
        names = [name for name in path.split("/") if not name.isdigit()]
        groups.setdefault(".".join(names[:-1] or names), []).append(array)
    return groups
