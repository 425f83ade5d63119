"""Summary of an array inside a program: norm, largest value, mean, zeros, non-finite elements."""

import math

import jax
import jax.numpy as jnp


def summarize(x: jax.Array, kept: int) -> jax.Array:
    """Return the statistics of `names.SUMMARY` along the last dimension, float32.

    All but the number of non-finite elements are of the finite ones.

    Args:
        x: an array.
        kept: number of leading dimensions that are not reduced.
    """
    values = x.astype(jnp.float32)
    is_finite = jnp.abs(values) <= jnp.finfo(jnp.float32).max
    values = jnp.where(is_finite, values, 0)
    reduced = tuple(range(kept, x.ndim))
    size = math.prod(x.shape[kept:])
    finite = is_finite.astype(jnp.float32).sum(reduced)
    is_zero = (x == 0).astype(jnp.float32)
    statistics = (
        jnp.sqrt(jnp.square(values).sum(reduced)),
        jnp.abs(values).max(reduced, initial=0),
        values.sum(reduced) / jnp.maximum(finite, 1),
        is_zero.sum(reduced) / size,
        size - finite,
    )
    return jnp.stack(statistics, -1)
