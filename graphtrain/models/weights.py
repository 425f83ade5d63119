"""How parameters are made: the names of their axes give their shapes."""

import jax
import jax.numpy as jnp
from flax import nnx

from graphtrain.config.schema import Model


def normal(model: Model, rngs: nnx.Rngs, *axes: str | None, scale: float = 1.0) -> nnx.Param:
    """Weights from N(0, initial_deviation * scale)."""
    deviation = model.initial_deviation * scale
    return nnx.Param(deviation * jax.random.normal(rngs.params(), _shape(model, axes)), axes=axes)


def zeros(model: Model, *axes: str | None) -> nnx.Param:
    return nnx.Param(jnp.zeros(_shape(model, axes)), axes=axes)


def ones(model: Model, *axes: str | None) -> nnx.Param:
    return nnx.Param(jnp.ones(_shape(model, axes)), axes=axes)


def _shape(model: Model, axes: tuple[str | None, ...]) -> tuple[int, ...]:
    """Sizes by axis name; None is a pair, kept together on every device."""
    return tuple(2 if axis is None else _size(model, axis) for axis in axes)


def _size(model: Model, axis: str) -> int:
    """All but the position table's rows and the experts are settings of the same name."""
    if axis in ("experts", "routes", "shared"):
        assert model.mixture is not None
        return (model.mixture.shared or 0) if axis == "shared" else model.mixture.experts
    return getattr(model, "max_length" if axis == "positions" else axis)
