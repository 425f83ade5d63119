"""First moments in fewer bits between steps: bfloat16, or int8 with one float32 scale for each row.

A step reads them as float32, and rounds the new moments to the nearest values. The optimizer itself
computes in float32: optax multiplies a bfloat16 moment by the decay rate in bfloat16, where 0.999
is 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from graphtrain.models.optimizer_state import MOMENTS, is_stored_in_int8
from sharding_rules.arrays import ArraySpec

_LARGEST = 127.0


def with_bfloat16_moments(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Build an optimizer whose first moments are stored in bfloat16.

    Args:
        inner: The optimizer, which computes with float32 moments.
    """
    return _stored(
        inner,
        lambda moments: jax.tree.map(lambda one: one.astype(jnp.bfloat16), moments),
        lambda moments: jax.tree.map(lambda one: one.astype(jnp.float32), moments),
    )


def with_int8_moments(
    inner: optax.GradientTransformation, parameters: Mapping[str, ArraySpec]
) -> optax.GradientTransformation:
    """Build an optimizer whose first moments are stored in int8; small arrays stay as they are.

    A row is the last dimension of a matrix.

    Args:
        inner: The optimizer, which computes with float32 moments.
        parameters: ArraySpecs of the parameters, by path.

    Source: block-wise quantization of optimizer states, Dettmers et al. 2022,
    https://arxiv.org/abs/2110.02861, section 2.1, here linear and with rows as blocks
    """
    quantized = {path for path, spec in parameters.items() if is_stored_in_int8(spec)}

    def store(moments: Any) -> Any:
        scales = {}

        def values(keys: Any, moment: jax.Array) -> jax.Array:
            if (path := _path(keys)) not in quantized:
                return moment
            largest = jnp.abs(moment).max(-1)
            scales[path] = largest / _LARGEST
            divisors = jnp.where(largest > 0, scales[path], 1.0)
            return jnp.round(moment / divisors[..., None]).astype(jnp.int8)

        stored = jax.tree_util.tree_map_with_path(values, moments)
        return {"values": stored, "scales": scales}

    def read(stored: Any) -> Any:
        def moment(keys: Any, values: jax.Array) -> jax.Array:
            if (scales := stored["scales"].get(_path(keys))) is None:
                return values
            return values.astype(jnp.float32) * scales[..., None]

        return jax.tree_util.tree_map_with_path(moment, stored["values"])

    return _stored(inner, store, read)


def _stored(
    inner: optax.GradientTransformation, store: Callable[[Any], Any], read: Callable[[Any], Any]
) -> optax.GradientTransformation:
    """Build an optimizer whose first moments are stored in another form than it computes with."""

    def init(params: Any) -> Any:  # optax's names
        return _map_moments(store, inner.init(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, new = inner.update(updates, _map_moments(read, state), params)
        return updates, _map_moments(store, new)

    return optax.GradientTransformation(init, update)


def _map_moments(change: Callable[[Any], Any], state: Any) -> Any:
    """Return the state of an optimizer with its first moments changed."""
    if isinstance(state, dict):
        pairs = state.items()
    elif hasattr(state, "_fields"):  # a named tuple of optax
        pairs = state._asdict().items()
    else:
        return state
    changed = {
        name: change(part)
        if name in MOMENTS
        else _map_moments(change, part)
        if name == "adam"
        else part
        for name, part in pairs
    }
    return changed if isinstance(state, dict) else type(state)(**changed)


def _path(keys: Any) -> str:
    return jax.tree_util.keystr(keys, simple=True, separator="/")
