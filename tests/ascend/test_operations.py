"""Every operation that graphs have, in MindSpore against JAX: random shapes and edge values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from mindir_graphs import translated

few = settings(  # every example is compiled twice
    max_examples=3,
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)
seeds = st.integers(0, 2**31)
shapes = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)

EDGES = np.array([0.0, -0.0, 1, -1, 0.5, -2.5, 1.5, 88, -88, np.inf, -np.inf, np.nan], np.float32)
INTEGERS = np.array([0, 1, -1, 7, -7, 2, 5, 2**31 - 1, -(2**31)], np.int32)
UNSIGNED = np.array([0, 1, 2, 7, 99, 2**16, 2**31, 2**32 - 1], np.uint32)


def floats(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def equal(pairs, tolerance=1e-6):
    for ours, theirs in pairs:
        np.testing.assert_allclose(
            ours.astype(np.float64), theirs.astype(np.float64), rtol=tolerance, atol=tolerance
        )


def pairs_of(values):
    left, right = np.meshgrid(values, values)
    return left.reshape(-1), right.reshape(-1)


@given(seeds, shapes)
@few
def test_functions_of_one_float(both, seed, shape):
    def every(x):
        rounding = [jnp.floor(x), jnp.ceil(x), jnp.rint(x), jnp.sign(x), jnp.abs(x), -x]
        waves = [jnp.sin(x), jnp.cos(x), jnp.tan(x), jnp.tanh(x)]
        results = [*rounding, *waves, jnp.exp(x), jnp.expm1(x), jnp.isfinite(x)]
        return [*results, jax.lax.logistic(x), jax.lax.erf(x)]

    def positive(x):
        return [jnp.log(x), jnp.log1p(x), jnp.sqrt(x), jax.lax.rsqrt(x)]

    equal(
        both(every, np.concatenate([EDGES, floats(seed, *shape).reshape(-1)])), 5e-5
    )  # its exp is an approximation
    equal(both(positive, np.abs(floats(seed, *shape)) + 0.1), 1e-5)


@given(seeds)
@few
def test_functions_of_two_floats(both, seed):
    def every(a, b):
        return [
            a + b,
            a - b,
            a * b,
            a / jnp.where(b == 0, 0, b),  # a CPU divides by -0 as by 0
            jnp.maximum(a, b),
            jnp.minimum(a, b),
            jnp.arctan2(a, b),
        ]

    left, right = pairs_of(EDGES)
    equal(both(every, left, right), 1e-6)
    equal(both(every, floats(seed, 3, 4), floats(seed + 1, 4)), 1e-6)
    base, exponent = pairs_of(np.array([0.0, 0.5, 1, 2, 3], np.float32))
    equal(both(jnp.power, base, exponent))
    equal(both(jax.lax.rem, floats(seed, 20) * 9, np.abs(floats(seed + 1, 20)) + 0.5), 1e-5)


def test_comparisons(both):
    def every(a, b):
        return [a == b, a != b, a < b, a <= b, a > b, a >= b, jnp.where(a < b, a, b)]

    for values in (EDGES, INTEGERS, UNSIGNED):
        equal(both(every, *pairs_of(values)))


def test_arithmetic_of_integers_wraps_and_truncates(both):
    def every(a, b):
        return [a + b, a - b, a * b, jax.lax.div(a, b), jax.lax.rem(a, b), jnp.maximum(a, b)]

    for values in (INTEGERS, UNSIGNED):
        equal(both(every, *pairs_of(values)))
    with jax.enable_x64(True):
        wide = np.array([0, 1, -1, 5, -7, 2**62, 2**63 - 1, -(2**63)], np.int64)
        equal(both(lambda a, b: [jax.lax.div(a, b), jax.lax.rem(a, b)], *pairs_of(wide)))


def test_bits(both):
    def every(a, b):
        return [a & b, a | b, a ^ b, ~a]

    def shifts(a, b):
        by = jax.lax.rem(b, jnp.array(40, b.dtype))
        by = jnp.where(by < 0, 33, by).astype(a.dtype)
        lax = jax.lax
        return [
            shift(a, by)
            for shift in (lax.shift_left, lax.shift_right_logical, lax.shift_right_arithmetic)
            if a.dtype != np.uint32 or shift is not lax.shift_right_arithmetic
        ]

    for values in (INTEGERS, UNSIGNED):
        equal(both(every, *pairs_of(values)))
        equal(both(shifts, *pairs_of(values)))
    truths = np.array([True, False])
    equal(both(every, *pairs_of(truths)))
    with jax.enable_x64(True):
        wide = np.array([0, 1, 2**31, 2**63 + 5, 2**64 - 1], np.uint64)
        by = np.array([0, 1, 31, 63, 64], np.uint64)
        equal_bits = both(lambda a, b: [jax.lax.shift_right_logical(a, b), a < b], wide, by)
        for ours, theirs in equal_bits:
            np.testing.assert_array_equal(ours, theirs)


def test_bits_as_floats(both):
    bits = [0, 0x800000, 0x800001, 0x3F800000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000]
    both_signs = np.array(bits + [one | 0x80000000 for one in bits], np.uint32)
    equal(both(lambda a: jax.lax.bitcast_convert_type(a, jnp.float32), both_signs), 0)
    equal(both(lambda a: jax.lax.bitcast_convert_type(a, jnp.int32), both_signs), 0)


def test_conversions(both):
    types = [jnp.int32, jnp.int8, jnp.uint8, jnp.uint32, jnp.bool_, jnp.float16, jnp.bfloat16]

    def every(x):
        return [x.astype(one) for one in types]

    numbers = [0.4, 1.5, -1.5, 127, 128, 255, 256, -129, 3e9, -3e9, np.nan, np.inf]
    equal(both(every, np.array(numbers, np.float32)), 0)
    integers = [jnp.float32, jnp.int8, jnp.uint8, jnp.uint32, jnp.int32, jnp.bool_]
    for values in (INTEGERS, UNSIGNED):
        equal(both(lambda x: [x.astype(one) for one in integers], values), 0)
    equal(both(lambda x: [x.astype(jnp.float32), x.astype(jnp.int32)], np.array([True, False])))


@given(seeds)
@few
def test_where_elements_are(both, seed):
    rng = np.random.default_rng(seed)
    x = floats(seed, *rng.integers(2, 6, 3))

    def every(x):
        low, high = (int(n) for n in rng.integers(0, 3, 2))
        padding = [(low, high, int(rng.integers(0, 3))), (-1, 0, 1), (0, -1, 0)]
        return [
            jnp.transpose(x, rng.permutation(3)),
            x.reshape(-1),
            jnp.broadcast_to(x[None], (2, *x.shape)),
            x[::-1, 1:, ::2],
            jnp.concatenate([x, x[:, :1]], 1),
            jax.lax.pad(x, jnp.float32(7), padding),
            jax.lax.broadcasted_iota(jnp.int32, x.shape, 1),
        ]

    equal(both(every, x), 0)


@given(seeds)
@few
def test_products(both, seed):
    b, i, j, k = np.random.default_rng(seed).integers(1, 5, 4)

    def every(x, y, z):
        return [
            jnp.einsum("bik,bkj->bij", x, y),
            jnp.einsum("bik,bkj->ji", x, y),
            jnp.einsum("bik,kj->bji", x, z),
            jnp.einsum("kj,k->j", z, z[:, 0]),
        ]

    equal(both(every, floats(seed, b, i, k), floats(seed + 1, b, k, j), floats(2, k, j)), 1e-5)


@given(seeds)
@few
def test_reductions(both, seed):
    def every(x):
        truths = x > 0
        return [
            x.sum((0, 2)), x.max(1), x.min(), x.prod(0), truths.any(0), truths.all((1, 2)),
            x.argmax(1), x.argmin(0), jnp.cumsum(x, 1), jnp.cumsum(x[::-1], 0),
        ]  # fmt: skip

    x = floats(seed, 3, 4, 2)
    x[0, 1] = x[0, 2]  # equal ones: the first counts
    equal(both(every, x), 1e-5)


@given(seeds)
@few
def test_reading_and_writing_at_indices(both, seed):
    rng = np.random.default_rng(seed)
    x, block = floats(seed, 6, 4), floats(seed + 1, 2, 3)
    start, column = np.int32(rng.integers(-2, 8)), np.int32(rng.integers(0, 3))
    rows = rng.integers(0, 8, 5).astype(np.int32)  # some outside

    def every(x, block, start, column, rows):
        updates = jnp.ones((5, 4))
        return [
            jax.lax.dynamic_slice(x, (start, column), (2, 3)),
            jax.lax.dynamic_update_slice(x, block, (start, column)),
            x[rows],
            jnp.take_along_axis(x, rows[:4].reshape(1, 4) % 6, 0),
            x.at[rows].add(updates),
            x.at[rows].max(updates),
            x.at[rows].min(updates),
            x.at[rows].multiply(2 * updates),
            x.at[rows[0], rows[1] % 4].set(9.0),
            x.at[:, rows[:2] % 4].set(3.0),
            jax.vmap(lambda row, n: row[n])(x, rows[jnp.arange(6) % 5] % 4),
        ]

    equal(both(every, x, block, start, column, rows), 1e-6)


@given(seeds)
@few
def test_sorting(both, seed):
    x = np.random.default_rng(seed).integers(-3, 4, (4, 6)).astype(np.float32)  # many equal

    def every(x):
        values, places = jax.lax.top_k(x, 3)
        return [
            jnp.sort(x, 1), jnp.argsort(x, 0), jnp.sort(x, 1, descending=True),
            jnp.argsort(x, 1, descending=True), values, places, jnp.sort(x.astype(jnp.int32), 0),
        ]  # fmt: skip

    equal(both(every, x), 0)


@given(seeds)
@few
def test_loops(both, seed):
    def every(x, w):
        last, stacked = jax.lax.scan(lambda c, a: (jnp.tanh(c @ a), c.sum()), x, w)
        gradient = jax.grad(
            lambda w: jax.lax.scan(lambda c, a: (jnp.tanh(c @ a), c), x, w)[0].sum()
        )
        return [last, stacked, gradient(w), jax.lax.fori_loop(0, 3, lambda n, c: c + n, x)]

    equal(both(every, floats(seed, 3, 3) / 2, floats(seed + 1, 5, 3, 3) / 2), 1e-4)


@given(seeds)
@few
def test_random_bits_are_those_of_jax(both, seed):
    def every(key):
        key = jax.random.wrap_key_data(key)
        return [
            jax.random.bits(key, (7,)),
            jax.random.bernoulli(key, 0.3, (4, 5)),
            jax.random.uniform(key, (5,)),
        ]

    key = np.array([0, seed], np.uint32)
    equal(both(every, key), 0)
    equal(both(lambda key: jax.random.normal(jax.random.wrap_key_data(key), (6, 3)), key), 1e-5)


def test_what_mindspore_lacks_is_one_error_with_its_line():
    from lowering.errors import LoweringError

    def turns(n):
        return jax.lax.while_loop(lambda c: c < n, lambda c: c * 2, jnp.int32(1))

    with pytest.raises(LoweringError, match=r"test_operations\.py:\d+: .*known only when it runs"):
        translated(turns, np.int32(9))
    with pytest.raises(
        LoweringError, match=r"test_operations\.py:\d+: .*no operation for convolution"
    ):
        translated(lambda x: jax.lax.conv(x, x, (1, 1), "SAME"), floats(0, 1, 1, 3, 3))
