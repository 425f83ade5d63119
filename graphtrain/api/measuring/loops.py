"""Measured loops over elements: streams of memory, functions, reductions, transpositions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import jax
import jax.numpy as jnp

from graphtrain.api.measuring.timing import less, measure
from graphtrain.cost_model.machine_profile import MeasuredFunction, MeasuredStream

_STREAMS = tuple(1 << power for power in (14, 17, 19, 20, 21, 23, 25))  # float32 elements
# float32 elements: so many that waking the threads of a loop does not count, in the third cache.
_ELEMENTS = 1 << 20
_ROWS = 1024
_ORDER = 192  # of matrices that are factored, as those of SOAP


def measure_streams(launch: float, observe: Callable[[str], None]) -> tuple[MeasuredStream, ...]:
    """Measure loops that read and write memory, in caches and beyond.

    Args:
        launch: seconds of a call that computes nothing, which are subtracted.
        observe: called with what is measured next.
    """
    observe("memory")
    found = []
    for elements in _STREAMS:
        a = jnp.ones(elements)
        copied = less(measure(lambda a: a * 2, a), launch)
        added = less(measure(lambda a, b: a + 2 * b, a, a + 1), launch)
        found.append(MeasuredStream(**asdict(copied), kind="copy", bytes=8 * elements))
        found.append(MeasuredStream(**asdict(added), kind="triad", bytes=12 * elements))
    return tuple(found)


def measure_functions(
    launch: float, observe: Callable[[str], None]
) -> tuple[MeasuredFunction, ...]:
    """Measure functions of elements, and loops that move or sum elements.

    Args:
        launch: seconds of a call that computes nothing, which are subtracted.
        observe: called with what is measured next.
    """
    observe("functions of elements")
    found = [_function(kind, *of, launch) for kind, of in _FUNCTIONS.items()]
    observe("reductions, transpositions, lookups")
    return (*found, *(_moved(kind, *case, launch) for kind, case in _cases().items()))


# Functions of numbers between 0.1 and 1, with the number of operations in each. Arithmetic and
# conversions are many, so that memory does not count.
_FUNCTIONS: dict[str, tuple[Callable[[jax.Array], jax.Array], int]] = {
    "arithmetic": (lambda x: _polynomial(x, 8), 16),
    "exp": (jnp.exp, 1),
    "log": (jnp.log, 1),
    "tanh": (jnp.tanh, 1),
    "erf": (jax.lax.erf, 1),
    "logistic": (jax.lax.logistic, 1),
    "rsqrt": (jax.lax.rsqrt, 1),
    "sqrt": (jnp.sqrt, 1),
    "sine": (jnp.sin, 1),
    "power": (lambda x: jnp.power(x, 0.9), 1),
    "divide": (lambda x: 1.0 / x, 1),
    "to_bfloat16": (lambda x: _rounded(x, 8), 9),
}


def _polynomial(x: jax.Array, degree: int) -> jax.Array:
    total = x
    for power in range(degree):
        total = total * x + 0.1 * power
    return total


def _rounded(x: jax.Array, times: int) -> jax.Array:
    """Multiply in bfloat16, which a CPU does in float32 with a conversion of each product."""
    for index in range(times):
        x = x.astype(jnp.bfloat16) * jnp.bfloat16(1 + index / 64)
    return x.astype(jnp.bfloat16)


def _function(
    kind: str, function: Callable[[jax.Array], jax.Array], operations: int, launch: float
) -> MeasuredFunction:
    measured = less(
        measure(function, jnp.linspace(0.1, 1.0, _ELEMENTS)), launch, operations * _ELEMENTS
    )
    return MeasuredFunction(**asdict(measured), kind=kind, elements=_ELEMENTS)


def _cases() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...], int]]:
    """Return function, arguments and number of elements of each kind of loop."""
    matrix, keys = jnp.ones((4 * _ROWS, 256)), jnp.arange(_ROWS << 4)[::-1]
    stacked, aliased = jnp.ones((4, _ROWS, 320)), jnp.ones((4, _ROWS, 512))
    narrow, heads = matrix.astype(jnp.bfloat16), jnp.ones((_ROWS, 5, 64), jnp.bfloat16)
    squares = jnp.stack([jnp.eye(_ORDER) + 1 / (1 + jnp.arange(_ORDER))] * 2)
    factored = _ORDER * squares.size
    indices = (jnp.arange(len(matrix)) * 7919) % len(matrix)
    return {
        "reduce": (lambda x: x.sum(1), (matrix,), matrix.size),
        "reduce_bfloat16": (_sum_in_bfloat16, (narrow,), narrow.size),
        "repeat_bfloat16": (_repeated, (jnp.bfloat16(1),), _ELEMENTS),
        "transposed": (_transposed_slice, (stacked, jnp.int32(1)), _ROWS * 320),
        "transposed_aliased": (_transposed_slice, (aliased, jnp.int32(1)), _ROWS * 512),
        "transposed_alone": (lambda x: x.T.copy(), (narrow,), narrow.size),
        "permuted": (_permuted_update, (stacked, heads, jnp.int32(1)), heads.size),
        "concatenate": (lambda x: jnp.concatenate([x, x], 1), (matrix,), 2 * matrix.size),
        "gather": (lambda x, i: x[i], (matrix, indices), matrix.size),
        "scatter": (lambda x, i: x.at[i].add(x), (matrix, indices), matrix.size),
        "random": (lambda k: jax.random.bits(k, (_ELEMENTS,)), (jax.random.key(0),), _ELEMENTS),
        "qr": (jnp.linalg.qr, (squares,), 2 * factored),  # two calls of LAPACK
        "eigh": (jnp.linalg.eigh, (squares,), factored),
        "sort": (jnp.argsort, (keys,), round(keys.size * jnp.log2(keys.size).item())),
    }


def _sum_in_bfloat16(x: jax.Array) -> jax.Array:
    """Sum over rows with partial sums in bfloat16, as gradients of PyTorch's products are."""
    return jax.lax.reduce(x, jnp.zeros((), x.dtype), jax.lax.add, (0,))


def _repeated(x: jax.Array) -> jax.Array:
    """Fill an array, as loops over layers do with those that they later store into."""
    return jnp.broadcast_to(x, (_ELEMENTS,))


def _transposed_slice(stacked: jax.Array, index: jax.Array) -> jax.Array:
    """Transpose one of several matrices, in the loop that reads it, as backward passes do."""
    return jax.lax.dynamic_index_in_dim(stacked, index, keepdims=False).T.astype(jnp.bfloat16)


def _permuted_update(stacked: jax.Array, heads: jax.Array, index: jax.Array) -> jax.Array:
    """Store heads in another order into one of several arrays, as forward passes do."""
    stack = stacked.reshape(len(stacked), heads.shape[1], _ROWS, heads.shape[2])
    update = jnp.transpose(heads, (1, 0, 2)).astype(stack.dtype)[None]
    return jax.lax.dynamic_update_slice_in_dim(stack[:1], update, index * 0, 0)


def _moved(
    kind: str,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    elements: int,
    launch: float,
) -> MeasuredFunction:
    measured = less(measure(function, *arguments), launch, elements)
    return MeasuredFunction(**asdict(measured), kind=kind, elements=elements)
