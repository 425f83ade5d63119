"""What an MLP makes of its wide products: an activation, times a second product where it is gated.

On a CPU bfloat16 is computed in float32 and rounded once. XLA:CPU rounds to bfloat16 after each
operation that bfloat16 is written for, which costs more than the operation; and the second pass
computes the activation again instead of reading what the first one wrote.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from lowering.tracing.cpu_hints import computed_once, on_cpu

Activation = Callable[[jax.Array], jax.Array]


def activated(activate: Activation, wide: list[jax.Array]) -> jax.Array:
    """Of gate and up, or of up alone, each (batch, seq, mlp): the hidden values."""
    if on_cpu() and wide[0].dtype == jnp.bfloat16:
        return _rounded_once(activate, wide)
    *gate, up = wide
    return activate(gate[0]) * up if gate else activate(up)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rounded_once(activate: Activation, wide: list[jax.Array]) -> jax.Array:
    return _in_float32(activate, wide).astype(wide[0].dtype)


def _forward(activate: Activation, wide: list[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
    return _rounded_once(activate, wide), wide


def _backward(
    activate: Activation, wide: list[jax.Array], gradient: jax.Array
) -> tuple[list[jax.Array]]:
    # Of its own, or XLA would keep what the first pass computed on the way, in float32; the
    # gradient of astype rounds, once, back to what each was.
    _, back = jax.vjp(partial(_in_float32, activate), computed_once(wide))
    return back(gradient.astype(jnp.float32))


_rounded_once.defvjp(_forward, _backward)


def _in_float32(activate: Activation, wide: list[jax.Array]) -> jax.Array:
    first, *rest = (x.astype(jnp.float32) for x in wide)
    return activate(first) * rest[0] if rest else activate(first)
