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

Activation = Callable[..., jax.Array]  # hidden values of gate and up, or of up without a gate

_SWIGLU_ALPHA, _SWIGLU_LIMIT = 1.702, 7.0  # as in all published models


def _gated(activate: Callable[[jax.Array], jax.Array]) -> Activation:
    return lambda gate, up: activate(gate) * up


def swiglu_clamped(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Return the clamped SwiGLU of gpt-oss, in which the up projection is biased by 1.

    Source: https://github.com/openai/gpt-oss, gpt_oss/torch/model.py
    """
    gate = jnp.minimum(gate, _SWIGLU_LIMIT)
    up = jnp.clip(up, -_SWIGLU_LIMIT, _SWIGLU_LIMIT)
    return gate * jax.nn.sigmoid(_SWIGLU_ALPHA * gate) * (up + 1)


ACTIVATIONS: dict[str, Activation] = {
    "swiglu": _gated(jax.nn.silu),
    "swiglu_clamped": swiglu_clamped,
    "geglu": _gated(partial(jax.nn.gelu, approximate=False)),
    "geglu_tanh": _gated(partial(jax.nn.gelu, approximate=True)),
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}


def apply_activation(activate: Activation, gate_up: list[jax.Array]) -> jax.Array:
    """Return hidden values from [gate, up], or from [up] without a gate, all (batch, seq, mlp)."""
    if on_cpu() and gate_up[0].dtype != jnp.float32:
        return _apply_in_float32(activate, gate_up)
    return activate(*gate_up)


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
    return activate(*(x.astype(jnp.float32) for x in projections))
