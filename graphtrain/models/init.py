"""Initialization of parameters, whose shapes follow from the names of their array axes."""

import jax
import jax.numpy as jnp
from flax import nnx

from graphtrain.config.schema import Model
from graphtrain.models.shapes import axis_size


class ParameterKeys:
    """Source of random keys for weights, one per call, equal to those of nnx.Rngs.

    Keys are made 16 at a time. Made one at a time, each would be a loop in the init program, which
    would then take longer to load than to run.
    """

    _AT_ONCE = 16

    def __init__(self, key: jax.Array):
        self._key = key
        self._made: list[jax.Array] = []
        self._next = 0

    def __call__(self) -> jax.Array:
        """Return the next key."""
        if not self._made:
            counters = self._next + jnp.arange(self._AT_ONCE, dtype=jnp.uint32)
            self._made = list(jax.vmap(jax.random.fold_in, (None, 0))(self._key, counters))
            self._next += self._AT_ONCE
        return self._made.pop(0)


def normal(model: Model, keys: ParameterKeys, *axes: str | None, scale: float = 1.0) -> nnx.Param:
    """Return a parameter with these array axes, normal with deviation init_std * scale."""
    deviation = model.init_std * scale
    return nnx.Param(deviation * jax.random.normal(keys(), _shape(model, axes)), axes=axes)


def zeros(model: Model, *axes: str | None) -> nnx.Param:
    """Return a parameter of zeros with these array axes."""
    return nnx.Param(jnp.zeros(_shape(model, axes)), axes=axes)


def buffer(model: Model, *axes: str | None) -> nnx.Param:
    """Return zeros with these array axes, which the step updates without gradients."""
    return nnx.Param(jnp.zeros(_shape(model, axes)), axes=axes, role="buffer")


def ones(model: Model, *axes: str | None) -> nnx.Param:
    """Return a parameter of ones with these array axes."""
    return nnx.Param(jnp.ones(_shape(model, axes)), axes=axes)


def _shape(model: Model, axes: tuple[str | None, ...]) -> tuple[int, ...]:
    """Return sizes by axis name; None is a pair, gate and up, which is never sharded."""
    return tuple(axis_size(model, axis) for axis in axes)
