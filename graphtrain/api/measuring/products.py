"""Measured matrix products: square, tall, narrow, batched as those of attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict

import jax
import jax.numpy as jnp

from graphtrain.api.measuring.timing import less, measure_in_turn
from graphtrain.cost_model.machine_profile import CACHED_BYTES, MeasuredProduct

# batch, rows, summed, columns. Products of training steps: of weights, of their gradients, of the
# LM head, of the scores of attention, of scores with values, and of the gradients of keys and
# values.
SHAPES = (
    (1, 32, 32, 32),
    (1, 128, 128, 128),
    (1, 512, 512, 512),
    (1, 1024, 1024, 1024),
    (1, 2048, 2048, 2048),
    (1, 2048, 192, 512),
    (1, 192, 2048, 512),
    (1, 1024, 512, 64),
    (1, 2048, 256, 4096),
    (1, 256, 2048, 4096),
    (1, 2048, 4096, 256),
    (1, 512, 1024, 8192),
    (1, 1024, 8192, 512),
    (32, 128, 64, 128),
    (32, 128, 128, 64),
    (32, 64, 128, 128),
    (32, 32, 256, 128),
    (8, 1024, 64, 1024),
    (8, 1024, 1024, 64),
    (8, 64, 1024, 1024),
)
# dtype of the operands in HLO and JAX, and of the sums
_DTYPES = {"f32": ("float32", "float32"), "bf16": ("bfloat16", "float32"), "s8": ("int8", "int32")}
# A CPU without instructions for 8 bits takes 50 times as long: one shape of each kind is enough.
_FEW = (SHAPES[1], SHAPES[2], SHAPES[5])
_UNCACHED = 1 << 26  # bytes of operands that caches of a few cores do not hold together
_LARGE = 1 << 24  # bytes of an array that is not in a cache any more when all of it is computed


def measure_products(launch: float, observe: Callable[[str], None]) -> tuple[MeasuredProduct, ...]:
    """Measure products of each dtype.

    Args:
        launch: seconds of a call that computes nothing, which are subtracted.
        observe: called with what is measured next.
    """
    found = []
    for name in _DTYPES:
        observe(f"products, {name}")
        shapes = _FEW if name == "s8" else SHAPES
        found += [_measure(name, *sizes, launch=launch) for sizes in shapes]
    return tuple(found)


def _measure(
    name: str, batch: int, rows: int, summed: int, columns: int, *, launch: float
) -> MeasuredProduct:
    dtype, sums = _DTYPES[name]
    shapes = (batch, rows, summed), (batch, summed, columns)
    operands = [
        [jnp.ones(shape if batch > 1 else shape[1:], dtype) for _ in range(copies)]
        for shape, copies in zip(shapes, _copies(shapes, jnp.dtype(dtype).itemsize), strict=True)
    ]
    several = [
        tuple(of[index % len(of)] for of in operands) for index in range(max(map(len, operands)))
    ]
    precision = jax.lax.Precision.HIGHEST if dtype == "float32" else None

    def multiply(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.matmul(a, b, precision=precision, preferred_element_type=jnp.dtype(sums))

    measured = less(measure_in_turn(multiply, several), launch)
    sizes = {"batch": batch, "rows": rows, "summed": summed, "columns": columns}
    return MeasuredProduct(**asdict(measured), dtype=name, **sizes)


def _copies(shapes: tuple[tuple[int, ...], tuple[int, ...]], item: int) -> tuple[int, int]:
    """Return of how many arrays each operand of a product is taken in turn.

    In a step, one operand was computed just before; the other, a weight or a saved activation, was
    written a layer or a step ago and comes from memory, as the arrays of loops do. What no cache
    holds comes from memory in any case, small products do not.
    """
    first, second = (item * math.prod(shape) for shape in shapes)
    if first + second <= CACHED_BYTES:
        return 1, 1
    in_turn = [max(2, _UNCACHED // size) for size in (first, second)]
    return in_turn[0] if first >= _LARGE else 1, in_turn[1]
