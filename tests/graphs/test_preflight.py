"""Each rule of preflight on programs that JAX makes: one that breaks it, and one that does not."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from programs import CUBE, GPT2, LLAMA, lower, program

from graphtrain.config.schema import Batch, Mesh, MixtureOfExperts, Model
from lowering.errors import LoweringError, OutOfMemory
from lowering.hlo.proto import read_module
from lowering.machine.target import Target
from lowering.neuron import backend
from lowering.neuron.instructions import estimate
from lowering.neuron.preflight import check, instruction_limit, preflight
from lowering.per_device.normalize import normalize_module
from lowering.xla.spmd_module import partition_spmd

FLOATS = np.zeros((4, 8), np.float32)
INTEGERS = np.zeros((4, 8), np.int32)


def normalised(step, *inputs):
    return normalize_module(partition_spmd(jax.jit(step).lower(*inputs)).hlo, name="step", ranks=1)


def codes(step, *inputs, target="trn1:1", flags=()):
    """Codes of the findings of a step, with their severity."""
    found = preflight(normalised(step, *inputs).hlo, Target.parse(target), flags)
    return {(one.code, one.severity) for one in found}


def described(*shape):
    return jax.ShapeDtypeStruct(shape, np.float32)


def shifted(x):
    return lax.shift_right_arithmetic(x, x)


def added_by_index(x):
    return jnp.zeros((8,), np.int32).at[x[0]].add(x[1])


def grown(x):
    return lax.while_loop(lambda y: y.sum() < x.sum(), lambda y: y + 1, x)


def windows(base, window):
    def step(x):
        return lax.reduce_window(x, 0.0, lax.add, (2, 2), (1, 1), "VALID", base, window)

    return step


def largest_and_smallest(x):
    def pair(one, other):
        return jnp.maximum(one[0], other[0]), jnp.minimum(one[1], other[1])

    return lax.reduce_window((x, x), (-np.inf, np.inf), pair, (2, 2), (1, 1), "VALID")


def convolved(strides, of_input, of_kernel):
    def step(x):
        image = x[None, :, :, None]
        return lax.conv_general_dilated(
            image, image[0, :2, :2, :, None], strides, ((2, 2), (2, 2)), of_input, of_kernel,
            ("NHWC", "HWIO", "NHWC"),
        )  # fmt: skip

    return step


def first_rows(x):
    numbers = lax.GatherDimensionNumbers((1,), (0,), (0,))
    return lax.gather(x, lax.iota(np.int32, 9)[:, None], numbers, (1, 8), mode="clip")


def into_first_rows(x):
    numbers = lax.ScatterDimensionNumbers((1,), (0,), (0,))
    return lax.scatter(x, lax.iota(np.int32, 9)[:, None], jnp.ones((9, 8)), numbers)


def drawn(x):
    key = lax.bitcast_convert_type(x[0, :4], np.uint32)
    return lax.rng_bit_generator(key, (8,), algorithm=lax.RandomAlgorithm.RNG_PHILOX)[1]


def through(dtype):
    return lambda x: x.astype(dtype).astype(jnp.float32)


BROKEN = {
    "a branch": ("EVRF001", lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), FLOATS),
    "a transform": ("EVRF001", lambda x: jnp.fft.rfft(x).real, FLOATS),
    "fewer bits": ("EVRF001", lambda x: lax.reduce_precision(x, 8, 7), FLOATS),
    "complex": ("EVRF004", lambda x: (x + 1j * x).imag, FLOATS),
    "fp8 of another kind": ("EVRF005", through(jnp.float8_e5m2fnuz), FLOATS),
    "fp8 with another bias": ("EVRF005", through(jnp.float8_e4m3b11fnuz), FLOATS),
    "fp8 of trn3": ("EVRF051", through(jnp.float8_e4m3fn), FLOATS),
    "integers added up by index": ("EVRF016", added_by_index, INTEGERS),
    "a shift of bytes": ("EVRF022", shifted, INTEGERS.astype(np.int8)),
    "several reductions at once": ("EVRF001", lambda x: jnp.argmax(x, axis=1), FLOATS),
    "a loop of the data's length": ("EUOC002", grown, FLOATS),
    "dilation of what is reduced": ("EVRF017", windows((2, 2), None), FLOATS),
    "dilation of a window": ("EVRF018", windows(None, (2, 2)), FLOATS),
    "windows of two arrays": ("EVRF019", largest_and_smallest, FLOATS),
    "dilation of input and kernel": ("EVRF010", convolved((1, 1), (2, 2), (2, 2)), FLOATS),
    "a stride on dilated input": ("EVRF011", convolved((2, 2), (2, 2), (1, 1)), FLOATS),
    "rows beyond the last": ("EVRF056", first_rows, FLOATS),
    "rows written beyond the last": ("EVRF031", into_first_rows, FLOATS),
    "another random generator": ("EVRF006", drawn, FLOATS),
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
    assert ("EOOM001", "error") in codes(lambda x: x + 1, described(2**33))


def test_logical_cores_are_refused_where_there_are_none():
    assert codes(lambda x: x + 1, FLOATS, flags=["--lnc", "2"]) == {("EARG001", "error")}
    assert not codes(lambda x: x + 1, FLOATS, flags=["--lnc", "1"])
    assert not codes(lambda x: x + 1, FLOATS, flags=["--lnc=2"], target="trn2:1")


def test_everything_wrong_is_told_at_once_with_lines_of_the_model():
    def step(x):
        y = lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x)
        return (y + 1j * y).imag

    made = normalised(step, FLOATS)
    with pytest.raises(LoweringError, match="so it was not started:\n") as caught:
        check(made.hlo, made.sources, "train", Target.parse("trn1:1"))
    said = str(caught.value).splitlines()[1:]
    assert {line.split("]")[0].strip() for line in said} == {"[NCC_EVRF001", "[NCC_EVRF004"}
    assert all("(from" in line and "test_preflight.py:" in line for line in said)


def test_what_does_not_fit_is_told_as_of_every_target():
    made = normalised(lambda x: x + 1, described(2**33))
    with pytest.raises(
        OutOfMemory, match=r"train does not fit in the memory of trn1:1: \[NCC_EOOM001\].*34.4 GB"
    ):
        check(made.hlo, made.sources, "train", Target.parse("trn1:1"))


def counted(step, *shapes):
    return estimate(read_module(normalised(step, *(described(*shape) for shape in shapes)).hlo))


def test_a_product_counts_its_tiles():
    count = counted(lambda x, y: x @ y, (1024, 4096), (4096, 1000))
    assert count.unrolled == count.loops_once == count.largest == (1024 // 128) * (4096 // 128) * 2


def test_a_loop_counts_as_often_as_it_runs_and_once():
    count = counted(lambda x: lax.fori_loop(0, 1000, lambda _, y: y @ y, x), (128, 128))
    assert count.unrolled == 1000 * count.loops_once
    assert count.loops_once < 10 and count.largest == 1


def test_a_loop_in_a_loop_is_unrolled_too():
    def inner(x):
        return lax.fori_loop(0, 10, lambda _, y: y @ y, x)

    count = counted(lambda x: lax.fori_loop(0, 10, lambda _, y: inner(y), x), (128, 128))
    assert 100 < count.unrolled < 1000


def test_writing_into_an_array_counts_what_is_written():
    def step(x, y):
        return lax.dynamic_update_slice(x, y, (0, 0))

    assert counted(step, (65536, 512), (128, 512)).largest == 1


def test_more_instructions_than_the_limit_are_told():
    large = described(2**14, 2**14)

    def step(x):
        return lax.fori_loop(0, 1000, lambda _, y: y @ y, x)

    found = codes(step, large)
    assert found == {("EVRF007", "warning"), ("EXTP003", "warning")}
    assert codes(step, large, target="trn2:1") == found
    assert ("EVRF007", "error") in codes(
        lambda x: step(x) + step(2 * x) @ x, described(2**15, 2**15)
    )


def test_a_flag_raises_the_limit():
    assert instruction_limit([]) == 5_000_000
    assert instruction_limit(["--optlevel=1", "--internal-max-instruction-limit=20000000"]) == 2e7
    assert instruction_limit(["--internal-max-instruction-limit", "15000000"]) == 15e6


def test_one_product_is_a_quarter_of_what_was_published():
    count = counted(lambda x, y: jnp.einsum("td,tdh->th", x, y), (4096, 4096), (4096, 4096, 4096))
    assert 4_194_304 / count.largest == 4


def lowered(graph, **settings):
    of = program(**settings)
    return lower(of, graph, backend)


def test_a_whole_step_is_a_third_of_what_was_published():
    model = Model(
        layers=32, embed=960, heads=15, kv_heads=5, mlp=2560, vocab=49152, tie_word_embeddings=True,
        remat="none",
    )  # fmt: skip
    batch = Batch(global_batch_size=8, seq_len=2048)
    step = lowered("train", model=model, batch=batch, target="trn1:1", mesh=Mesh())
    assert 3 < 37_536_776 / estimate(read_module(step.handle.hlo)).unrolled < 4


MIXTURE = dataclasses.replace(LLAMA, moe=MixtureOfExperts(experts=4, experts_per_token=2))
OURS = {
    "recomputed": dataclasses.replace(LLAMA, remat="dots", dtype="bfloat16"),
    "like GPT-2": dataclasses.replace(GPT2, dropout=0.1),
    "mixture": MIXTURE,
    "mixture with a capacity": dataclasses.replace(
        MIXTURE, moe=MixtureOfExperts(experts=4, experts_per_token=2, capacity_factor=1.25)
    ),
}


@pytest.mark.parametrize("name", OURS)
def test_our_own_models_pass(name):
    for graph in ("init", "train", "evaluate"):
        made = lowered(graph, **CUBE | {"model": OURS[name], "target": "trn1:8"})
        checked = check(made.handle.hlo, made.handle.sources, graph, made.target)
        assert checked["instructions"] > 0
        # Numbers of slots, which float32 holds exactly.
        assert all("all-reduce of s32" in warning for warning in checked["warnings"])
