"""Measured overheads: starting a step, an operation, an iteration of a loop."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from graphtrain.api.measuring.timing import measure
from graphtrain.cost_model.machine_profile import Measured

_ITERATIONS, _OPERATIONS, _ARRAYS = 200, 16, 200
_ELEMENTS = 1024  # XLA:CPU compiles loops over 1 kB and less into one operation


def measure_overheads(observe: Callable[[str], None]) -> dict[str, Measured]:
    """Measure what an operation, an iteration, a step and each of its arrays cost besides work."""
    observe("overheads")
    small = jnp.ones(_ELEMENTS)
    step = measure(lambda x: x + 1, small)
    few, many = (measure(_loop(operations), small) for operations in (1, 1 + _OPERATIONS))
    launch = (many.seconds - few.seconds) / (_ITERATIONS * _OPERATIONS)
    iteration = (few.seconds - step.seconds) / _ITERATIONS - launch
    arrays = [small + index for index in range(_ARRAYS)]
    with_arrays = measure(lambda *each: each, *arrays)
    per_array = (with_arrays.seconds - step.seconds) / (2 * _ARRAYS)
    return {
        "step": step,
        "launch": Measured(max(launch, 1e-9), many.spread),
        "iteration": Measured(max(iteration, 1e-9), few.spread),
        "array": Measured(max(per_array, 1e-9), with_arrays.spread),
    }


def _loop(operations: int) -> Callable[[jax.Array], jax.Array]:
    """Return a loop whose body starts a number of operations."""

    def body(_: int, x: jax.Array) -> jax.Array:
        for _ in range(operations):
            x = jax.lax.optimization_barrier(x + 1)
        return x

    return lambda x: jax.lax.fori_loop(0, _ITERATIONS, body, x)
