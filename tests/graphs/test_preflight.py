"""Each rule of preflight on programs that JAX makes: one that breaks it, and one that does not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from lowering.neuron.normalise import normalise
from lowering.neuron.preflight import preflight
from lowering.partitioned import partitioned
from lowering.target import Target

FLOATS = np.zeros((4, 8), np.float32)
INTEGERS = np.zeros((4, 8), np.int32)


def codes(step, *inputs, target="trn1:1"):
    """Codes of the findings of a step, with their severity."""
    lowered = jax.jit(step).lower(*inputs)
    hlo = normalise(partitioned(lowered), name="step", ranks=1).hlo
    return {(one.code, one.severity) for one in preflight(hlo, Target.parse(target))}


def shifted(x):
    return lax.shift_right_arithmetic(x, x)


def added_by_index(x):
    return jnp.zeros((8,), np.int32).at[x[0]].add(x[1])


def grown(x):
    return lax.while_loop(lambda y: y.sum() < x.sum(), lambda y: y + 1, x)


def dilated(x):
    return lax.reduce_window(x, 0.0, lax.add, (2, 2), (1, 1), "VALID", None, (2, 2))


def through(dtype):
    return lambda x: x.astype(dtype).astype(jnp.float32)


BROKEN = {
    "a branch": ("EVRF001", lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), FLOATS),
    "a transform": ("EVRF001", lambda x: jnp.fft.rfft(x).real, FLOATS),
    "fewer bits": ("EVRF001", lambda x: lax.reduce_precision(x, 8, 7), FLOATS),
    "complex": ("EVRF004", lambda x: (x + 1j * x).imag, FLOATS),
    "fp8 of another kind": ("EVRF005", through(jnp.float8_e5m2fnuz), FLOATS),
    "fp8 of trn3": ("EVRF051", through(jnp.float8_e4m3fn), FLOATS),
    "integers added up by index": ("EVRF016", added_by_index, INTEGERS),
    "a shift of bytes": ("EVRF022", shifted, INTEGERS.astype(np.int8)),
    "several reductions at once": ("EVRF001", lambda x: jnp.argmax(x, axis=1), FLOATS),
    "a loop of the data's length": ("EUOC002", grown, FLOATS),
    "dilation": ("EVRF010", dilated, FLOATS),
}
SOUND = {
    "both branches": lambda x: jnp.where(x > 0, jnp.sin(x), jnp.cos(x)),
    "a product": lambda x: x @ x.T,
    "a loop of a fixed length": lambda x: lax.fori_loop(0, 10, lambda _, y: y * 2, x),
    "a scan": lambda x: lax.scan(lambda c, row: (c + row.sum(), row), 0.0, x)[1],
    "a sort": lambda x: jnp.sort(x, axis=1),
    "rows by number": lambda x: x[jnp.array([0, 2])],
    "its own bits": lambda x: lax.reduce_precision(x, 8, 23),
    "bfloat16": lambda x: x.astype(jnp.bfloat16).sum(),
    "numbers put in place": lambda x: jnp.zeros((4, 8)).at[1].set(x[0]),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_the_compiler_refuses_is_found(name):
    code, step, given = BROKEN[name]
    assert (code, "error") in codes(step, given)


@pytest.mark.parametrize("name", SOUND)
def test_what_the_compiler_takes_is_not(name):
    assert not codes(SOUND[name], FLOATS)


def test_products_of_integers_are_told_but_let_pass():
    assert codes(lambda x: x @ x.T, INTEGERS) == {("EVRF035", "warning")}


def test_fp8_of_trn3_is_taken_there():
    assert not codes(through(jnp.float8_e4m3fn), FLOATS, target="trn3:1")


def test_inputs_beyond_the_memory_are_found():
    described = jax.ShapeDtypeStruct((2**33,), np.float32)
    assert ("EOOM001", "error") in codes(lambda x: x + 1, described)


def test_more_instructions_than_the_limit_are_told():
    large = jax.ShapeDtypeStruct((2**14, 2**14), np.float32)

    def step(x):
        return lax.fori_loop(0, 1000, lambda _, y: y @ y, x)

    assert ("EVRF007", "warning") in codes(step, large)
