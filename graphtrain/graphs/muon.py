"""Muon: momentum of matrices, orthogonalized where whole matrices are; the rest by AdamW.

Weights rest in shards, and Newton-Schulz needs whole matrices. Gathering them would send each
matrix to every device, and every device would compute the same. Here matrices of one shape lie in
a stack, and an all-to-all exchanges shards of all matrices for some whole matrices, which only this
device orthogonalizes; a second one brings the shards back (`graphtrain.models.matrices`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from graphtrain.config.schema import Optimizer
from graphtrain.graphs.whole_matrices import (
    average,
    divide,
    give_back_matrices,
    groups_of,
    partition,
    take_matrices,
)
from graphtrain.models.matrices import MUON_SCOPE, MatrixGroup, is_hidden_matrix
from lowering.tracing.constrain import on_each_device
from lowering.trees import unflatten
from sharding_rules.arrays import ArraySpec

# Chosen by Jordan for a steep slope at zero: singular values end between 0.7 and 1.2.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_SMALLEST_NORM = 1e-7

Arrays = Mapping[str, jax.Array]


def scale_by_muon(
    optimizer: Optimizer, parameters: Mapping[str, ArraySpec], dtype: str
) -> optax.GradientTransformation:
    """Build Muon for the matrices of the layers, and Adam for all other parameters.

    Args:
        optimizer: Settings.
        parameters: ArraySpecs of the parameters, by path.
        dtype: Dtype of the Newton-Schulz iteration.

    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/; the scale of updates:
    Liu et al. 2025, https://arxiv.org/abs/2502.16982, section 2.2
    """
    matrices = {path: spec for path, spec in parameters.items() if is_hidden_matrix(spec)}
    decay, nesterov = optimizer.momentum_or_default, optimizer.nesterov_or_default
    adam = optax.scale_by_adam(optimizer.beta1, optimizer.beta2, optimizer.epsilon)

    def init(params: Any) -> Any:  # optax's names
        of_matrices, others = divide(params, matrices)
        momenta = {path: jnp.zeros_like(array) for path, array in of_matrices.items()}
        return {"mu": momenta, "adam": adam.init(others)}

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        gradients, others = divide(updates, matrices)
        momenta = {
            path: average(state["mu"][path], gradient, decay)
            for path, gradient in gradients.items()
        }
        ahead = {
            path: decay * momentum + (1 - decay) * gradients[path] if nesterov else momentum
            for path, momentum in momenta.items()
        }
        orthogonal = orthogonalize(
            ahead,
            matrices,
            steps=optimizer.newton_schulz_steps_or_default,
            rms=optimizer.consistent_rms_or_default,
            dtype=dtype,
        )
        by_adam: Any
        by_adam, adam_state = adam.update(others, state["adam"])
        return unflatten(orthogonal | by_adam), {"mu": momenta, "adam": adam_state}

    return optax.GradientTransformation(init, update)


def orthogonalize(
    arrays: Arrays, specs: Mapping[str, ArraySpec], *, steps: int, rms: float, dtype: str
) -> dict[str, jax.Array]:
    """Return the nearest semi-orthogonal matrix of each, approximately, with a given mean square.

    Args:
        arrays: Matrices, or stacks of them, by path.
        specs: Their ArraySpecs.
        steps: Newton-Schulz iterations.
        rms: Root mean square of the result, whatever the shape.
        dtype: Dtype of the iteration, and of the shards that devices exchange.
    """
    results: dict[str, jax.Array] = {}
    for group in groups_of(specs):

        def update_shards(*shards: jax.Array, group: MatrixGroup = group) -> tuple[jax.Array, ...]:
            return _update_shards(shards, group, steps, rms)

        splits = [partition(path, specs[path]) for path in group.axes]
        narrow = [arrays[path].astype(dtype) for path in group.axes]
        with jax.named_scope(MUON_SCOPE):
            updated = on_each_device(update_shards, splits, tuple(splits))(*narrow)
        for path, array in zip(group.axes, updated, strict=True):
            results[path] = array.astype(arrays[path].dtype)
    return results


def _update_shards(
    shards: tuple[jax.Array, ...], group: MatrixGroup, steps: int, rms: float
) -> tuple[jax.Array, ...]:
    """Orthogonalize the matrices of a group, given and returned as one device's shards."""
    stack = take_matrices(shards, group)
    whole = stack.shape
    rows = math.prod(whole[1 : 1 + group.row_dimensions])
    matrices = newton_schulz(stack.reshape(len(stack), rows, -1), steps)
    stack = (matrices * (rms * max(matrices.shape[1:]) ** 0.5)).reshape(whole)
    return give_back_matrices(stack, shards, group)


def newton_schulz(matrices: jax.Array, steps: int) -> jax.Array:
    """Return matrices (stack, rows, columns) with singular values near 1, by a quintic iteration.

    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/
    """
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices  # the smaller products
    squares = jnp.square(x.astype(jnp.float32)).sum((1, 2), keepdims=True)
    x = (x / jnp.maximum(jnp.sqrt(squares), _SMALLEST_NORM)).astype(x.dtype)
    first, second, third = _COEFFICIENTS
    for _ in range(steps):
        gram = x @ x.mT
        x = first * x + (second * gram + third * (gram @ gram)) @ x
    return x.mT if is_tall else x
