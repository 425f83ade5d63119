"""Whether XLA compiles for a CPU what is traced, and what is written otherwise for one.

XLA:CPU fuses into a loop whatever the loop reads, and computes it again for each element that does:
the angles of rotary positions once a head. An optimization barrier says what to compute once and
keep. `lowering.xla` has XLA:CPU leave them in, which by default takes them out before it fuses.

XLA:CPU takes two to three times as long to round to bfloat16 in a loop over rows as to do the same
by integers. It fuses those into fewer loops, so cast is for what ends in a barrier anyway.
"""

from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from lowering.tracing.current_target import traced_target

# By XLA's name of the pass that takes barriers out (jaxlib 0.10, 0.11).
KEEP_BARRIERS = {"xla_disable_hlo_passes": "cse_barrier_expander"}

Arrays = TypeVar("Arrays")


def on_cpu() -> bool:
    """Whether what is traced is for a CPU; not so where nobody said."""
    target = traced_target()
    return target is not None and target.platform == "cpu"


def computed_once(arrays: Arrays) -> Arrays:
    """Arrays that XLA:CPU is to compute once and keep; on other platforms, as they are."""
    return jax.lax.optimization_barrier(arrays) if on_cpu() else arrays


def cast(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """x.astype(dtype), and its gradient alike: to the nearest, of two as near the even one."""
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
    other = jnp.float32 if dtype == jnp.bfloat16 else jnp.bfloat16
    return (_cast(gradient, jnp.dtype(other)),)


_cast.defvjp(_cast_forward, _cast_backward)


def _rounded(x: jax.Array) -> jax.Array:
    """float32 to bfloat16, whose bits are the upper half of float32's."""
    # Every value is used once: XLA keeps, and does not fuse, what would be computed for two.
    bits = jax.lax.bitcast_convert_type(jax.lax.reduce_precision(x, 8, 7), jnp.uint32)
    return jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)
