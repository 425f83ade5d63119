"""Variants of traced code that save memory with XLA:TPU: casts inside of loops, unpadded heads."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from lowering.machine.target import TPU_LANES
from lowering.tracing.current_target import traced_target


def on_tpu() -> bool:
    """Return whether the code is being traced for a TPU target; False without a target."""
    target = traced_target()
    return target is not None and target.platform == "tpu"


def cast_where_used(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Cast `x` here also with XLA:TPU, which would cast float32 weights before the loop over them.

    From a loop that reads one layer of a stack in bfloat16, XLA:TPU's pass bfloat16-propagation
    makes one that reads a stack in bfloat16, a copy of all layers' weights for the duration of the
    step. It does not change operands of reduce-precision, which here rounds as the cast would. Both
    are fused into the product: it then reads 4 bytes for a weight each time, where the pass's cast
    reads 4, writes 2, and products read 2.

    JAX's gradient of reduce-precision would be rounded: differentiate the caller as a whole.
    """
    if on_tpu() and x.dtype == jnp.float32 and jnp.dtype(dtype) == jnp.bfloat16:
        x = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return x.astype(dtype)


def pads_heads(x: jax.Array) -> bool:
    """Return whether a TPU pads the last dimension of x, as heads of 64, to rows of TPU_LANES."""
    return on_tpu() and x.shape[-1] % TPU_LANES > 0


def merge_heads(x: jax.Array) -> jax.Array:
    """Return x (batch, seq, heads, head_dim) as (batch, seq, heads x head_dim) if it was padded."""
    return x.reshape(*x.shape[:2], -1) if x.ndim == 4 and pads_heads(x) else x
