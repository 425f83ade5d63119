"""Variants of traced code for XLA:CPU: barriers that prevent recomputation, and fast casts.

XLA:CPU fuses producers into the loops that read them and recomputes them for each element: RoPE
angles, for example, once for each head. An optimization barrier makes it compute a value once and
store it. By default XLA:CPU removes barriers before fusion; `lowering.xla` disables that pass.

XLA:CPU is two to three times slower at rounding to bfloat16 in a loop over rows than at the same
rounding with integer operations. It fuses the integer form into fewer loops, so use
`cast_round_to_even` for values that end in a barrier anyway.
"""

from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from lowering.tracing.current_target import traced_target

# XLA's name of the pass that removes barriers (jaxlib 0.10, 0.11).
KEEP_OPTIMIZATION_BARRIERS = {"xla_disable_hlo_passes": "cse_barrier_expander"}

Arrays = TypeVar("Arrays")


def on_cpu() -> bool:
    """Return whether the code is being traced for a CPU target; False without a target."""
    target = traced_target()
    return target is not None and target.platform == "cpu"


def materialize(arrays: Arrays) -> Arrays:
    """Make XLA:CPU compute arrays once and store them; return them unchanged on other platforms."""
    return jax.lax.optimization_barrier(arrays) if on_cpu() else arrays


def cast_round_to_even(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Cast `x`, and its gradient, with round-to-nearest-even."""
    dtype = jnp.dtype(dtype)
    if on_cpu() and {x.dtype, dtype} == {jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)}:
        return _cast(x, dtype)
    return x.astype(dtype)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _cast(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return _rounded(x) if dtype == jnp.bfloat16 else x.astype(dtype)


def _cast_forward(x: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, None]:
    return _cast(x, dtype), None


def _cast_backward(dtype: jnp.dtype, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    source_dtype = jnp.float32 if dtype == jnp.bfloat16 else jnp.bfloat16
    return (_cast(gradient, jnp.dtype(source_dtype)),)


_cast.defvjp(_cast_forward, _cast_backward)


def _rounded(x: jax.Array) -> jax.Array:
    """Round float32 to bfloat16, whose bits are the upper half of those of float32."""
    # Each value has one use: XLA does not fuse a value that has two.
    bits = jax.lax.bitcast_convert_type(jax.lax.reduce_precision(x, 8, 7), jnp.uint32)
    return jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)
