"""Adafactor: second moments of a matrix as its row and column means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from graphtrain.models.matrices import STACK_AXES, MatrixAxes, matrix_axes
from lowering.trees import flatten, unflatten
from sharding_rules.arrays import ArraySpec

_DECAY_EXPONENT = -0.8  # 1 - step ** this is the decay rate of the second moment
_SMALLEST_SQUARE = 1e-30
_SMALLEST_SCALE = 1e-3  # of a parameter, by which its updates are multiplied
_CLIP = 1.0  # largest root mean square of an update, before the scale


def scale_by_adafactor(parameters: Mapping[str, ArraySpec]) -> optax.GradientTransformation:
    """Build Adafactor with updates relative to the size of each parameter, without momentum.

    Optax factors the two largest axes of an array, which may be the stacked layers; here rows and
    columns follow from the names of axes, and each layer and expert is a parameter of its own.

    Args:
        parameters: ArraySpecs of the parameters, by path.

    Source: Shazeer and Stern 2018, https://arxiv.org/abs/1804.04235, algorithms 4 and 5
    """
    axes = {path: matrix_axes(spec) for path, spec in parameters.items()}
    inner = {path: _inner(spec) for path, spec in parameters.items()}

    def init(params: Any) -> Any:  # optax's names
        return {"count": jnp.zeros((), jnp.int32)} | _means(
            {path: jnp.zeros_like(array) for path, array in flatten(params).items()}, axes
        )

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        count = state["count"] + 1
        fresh = count.astype(jnp.float32) ** _DECAY_EXPONENT
        gradients, weights = flatten(updates), flatten(params)
        squares = {path: jnp.square(g) + _SMALLEST_SQUARE for path, g in gradients.items()}
        means = jax.tree.map(
            lambda old, new: old + fresh * (new - old),
            {part: state[part] for part in state if part != "count"},
            _means(squares, axes),
        )
        scaled = {
            path: _relative(
                gradient * _inverse_root(path, means, axes[path]), weights[path], inner[path]
            )
            for path, gradient in gradients.items()
        }
        return unflatten(scaled), {"count": count, **means}

    return optax.GradientTransformation(init, update)


def _inner(spec: ArraySpec) -> tuple[int, ...]:
    """Return the dimensions of one parameter: without stacked layers and experts."""
    return tuple(index for index, axis in enumerate(spec.axes) if axis not in STACK_AXES)


def _means(
    squares: Mapping[str, jax.Array], axes: Mapping[str, MatrixAxes | None]
) -> dict[str, dict[str, jax.Array]]:
    """Return means of squares over columns and over rows; of other arrays, the squares."""
    parts: dict[str, dict[str, jax.Array]] = {}
    for path, square in squares.items():
        if (each := axes[path]) is None:
            parts.setdefault("variance", {})[path] = square
        else:
            parts.setdefault("rows", {})[path] = square.mean(each.columns)
            parts.setdefault("columns", {})[path] = square.mean(each.rows)
    return parts


def _inverse_root(
    path: str, means: Mapping[str, Mapping[str, jax.Array]], axes: MatrixAxes | None
) -> jax.Array:
    """Return one over the root of the second moment, of the shape of the parameter."""
    if axes is None:
        return jax.lax.rsqrt(means["variance"][path])
    rows = jnp.expand_dims(means["rows"][path], axes.columns)
    columns = jnp.expand_dims(means["columns"][path], axes.rows)
    share = rows / rows.mean(axes.rows, keepdims=True)
    return jax.lax.rsqrt(share) * jax.lax.rsqrt(columns)


def _relative(update: jax.Array, weight: jax.Array, inner: tuple[int, ...]) -> jax.Array:
    """Clip an update by its root mean square, and multiply it by that of the parameter."""
    scale = jnp.maximum(_root_mean_square(weight, inner), _SMALLEST_SCALE)
    return update * (scale / jnp.maximum(1.0, _root_mean_square(update, inner) / _CLIP))


def _root_mean_square(array: jax.Array, dimensions: tuple[int, ...]) -> jax.Array:
    return jnp.sqrt(jnp.square(array).mean(dimensions, keepdims=True))
