"""Activation of an MLP, multiplied by the up projection where the MLP is gated.

On CPUs inputs of 16 bits are computed in float32 and rounded once. XLA:CPU would round to 16 bits
after every operation, which costs more than the operation. The backward pass recomputes the
activation instead of reading what the forward pass wrote.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from lowering.tracing.cpu_hints import materialize, on_cpu

Activation = Callable[[jax.Array], jax.Array]


def apply_activation(activate: Activation, gate_up: list[jax.Array]) -> jax.Array:
    """Return hidden values from [gate, up], or from [up] without a gate, all (batch, seq, mlp)."""
    if on_cpu() and gate_up[0].dtype != jnp.float32:
        return _apply_in_float32(activate, gate_up)
    *gate, up = gate_up
    return activate(gate[0]) * up if gate else activate(up)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _apply_in_float32(activate: Activation, projections: list[jax.Array]) -> jax.Array:
    return _in_float32(activate, projections).astype(projections[0].dtype)


def _forward(
    activate: Activation, projections: list[jax.Array]
) -> tuple[jax.Array, list[jax.Array]]:
    return _apply_in_float32(activate, projections), projections


def _backward(
    activate: Activation, projections: list[jax.Array], gradient: jax.Array
) -> tuple[list[jax.Array]]:
    # materialize separates this from the forward pass, whose float32 intermediates XLA would
    # otherwise keep. The gradient of astype rounds once, to the dtype of each input.
    _, vjp = jax.vjp(partial(_in_float32, activate), materialize(projections))
    return vjp(gradient.astype(jnp.float32))


_apply_in_float32.defvjp(_forward, _backward)


def _in_float32(activate: Activation, projections: list[jax.Array]) -> jax.Array:
    gate_or_up, *ups = (x.astype(jnp.float32) for x in projections)
    return activate(gate_or_up) * ups[0] if ups else activate(gate_or_up)
