"""How parameters are made: the names of their axes give their shapes."""

import jax
import jax.numpy as jnp
from flax import nnx

from graphtrain.config.schema import Model


class Keys:
    """Keys for weights, one after the other: those that nnx.Rngs gives.

    Many are made at once. Each by itself is a loop in init, which then takes longer to load than
    to run.
    """

    _AT_ONCE = 16

    def __init__(self, key: jax.Array):
        self._key = key
        self._made: list[jax.Array] = []
        self._next = 0

    def __call__(self) -> jax.Array:
        if not self._made:
            numbers = self._next + jnp.arange(self._AT_ONCE, dtype=jnp.uint32)
            self._made = list(jax.vmap(jax.random.fold_in, (None, 0))(self._key, numbers))
            self._next += self._AT_ONCE
        return self._made.pop(0)


def normal(model: Model, keys: Keys, *axes: str | None, scale: float = 1.0) -> nnx.Param:
    """Weights from N(0, initial_deviation * scale)."""
    deviation = model.initial_deviation * scale
    return nnx.Param(deviation * jax.random.normal(keys(), _shape(model, axes)), axes=axes)


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
