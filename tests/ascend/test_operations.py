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
once = settings(few, max_examples=1)  # of many operations
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


@given(seeds)
@once
def test_narrow_integers(both, seed):
    rng = np.random.default_rng(seed)
    types = (np.int8, np.uint8, np.int16, np.uint16)
    pairs = []
    for dtype in types:
        ends = np.iinfo(dtype)
        edges = [0, 1, 2, ends.min, ends.max, ends.max // 2, *rng.integers(ends.min, ends.max, 3)]
        pairs.append(pairs_of(np.array(edges, dtype)))

    def of_two(a, b):
        lax, by = jax.lax, (b & 7).astype(a.dtype)
        results = [a + b, a - b, a * b, lax.div(a, b), lax.rem(a, b), a & b, a ^ b, ~a, a < b]
        results += [jnp.maximum(a, b), jnp.minimum(a, b), lax.shift_left(a, by)]
        results += [lax.shift_right_logical(a, by), lax.shift_right_arithmetic(a, by)]
        return [*results, jnp.sort(a), a.argmax(), a[::-1], jnp.pad(a, 1), a.astype(jnp.float32)]

    equal(both(lambda *pairs: [of_two(a, b) for a, b in pairs], *pairs), 0)


@given(seeds)
@few
def test_what_is_not_a_number_is_the_greatest(both, seed):
    x = np.random.default_rng(seed).choice(EDGES[[0, 1, 4, 9, 10, 11]], (4, 7))

    def every(x):
        found = [x.max(1), x.min(0), jnp.sort(x, 1), jnp.sort(x, 0, descending=True)]
        found += [jax.lax.top_k(x, 3)[0], jnp.cumsum(x, 1)]
        return [jnp.nan_to_num(one, nan=99.0) for one in found] + [
            x.argmax(1), x.argmin(0), jnp.argsort(x, 1), jax.lax.top_k(x, 3)[1],
        ]  # fmt: skip

    equal(both(every, x), 0)


@given(seeds)
@few
def test_running_sums_and_maxima(both, seed):
    rng = np.random.default_rng(seed)
    x = rng.integers(-9, 9, (3, 5)).astype(np.int32)
    unsigned = rng.integers(2**31, 2**32, 6).astype(np.uint32)

    def every(x, unsigned):
        lax = jax.lax
        signed = [jnp.cumsum(x, 1), lax.cummax(x, 1), lax.cummax(x, 0, reverse=True)]
        return [*signed, jnp.cumsum(unsigned), lax.cummax(unsigned), unsigned.sum(), x[:1, :1]]

    equal(both(every, x, unsigned), 0)


@given(seeds)
@few
def test_loops_whose_turns_are_known_when_they_run(both, seed):
    rng = np.random.default_rng(seed)
    turns, limit = np.int32(rng.integers(0, 6)), np.float32(rng.integers(1, 20))

    def write(x, turns, limit, w):
        """As generation does: until all is written, or something says stop."""

        def goes_on(state):
            number, x, _ = state
            return (number < turns) & (x.sum() < limit)

        def turn(state):
            number, x, written = state
            x = jnp.tanh(x @ w) + 1
            return number + 1, x, jax.lax.dynamic_update_slice(written, x[None], (number, 0))

        return jax.lax.while_loop(goes_on, turn, (jnp.int32(0), x, jnp.zeros((6, 3))))

    def nested(x, turns):
        def inner(n, x):
            return jax.lax.while_loop(
                lambda s: s[0] < n, lambda s: (s[0] + 1, s[1] * 1.1 + n), (0, x)
            )[1]

        def turn(state):
            number, x = state
            x = jax.lax.fori_loop(0, 2, lambda n, x: x + n, x)  # written out
            return number + 1, inner(number, x)

        return jax.lax.while_loop(lambda s: s[0] < turns, turn, (0, x))

    def every(x, turns, limit, w):
        return write(x, turns, limit, w), nested(x, turns)

    equal(both(every, floats(seed, 3), turns, limit, floats(seed + 1, 3, 3) / 3), 1e-4)


@given(st.integers(-1, 4), st.booleans())
@few
def test_branches_that_are_chosen_when_they_run(both, number, truth):
    branches = [lambda x: (x * 2, x), lambda x: (x + 1, -x), lambda x: (jnp.tanh(x), x * x)]

    def every(number, truth, x):
        chosen = jax.lax.switch(number, branches, x)
        return chosen, jax.lax.cond(truth, lambda x: x - 1, lambda x: x @ x.T, x)

    equal(both(every, np.int32(number), np.bool_(truth), floats(0, 2, 2)), 1e-5)


def test_a_loop_reads_a_variable_before_it_is_written(mindspore, tmp_path):
    def step(state, turns):
        kept = jax.lax.while_loop(
            lambda s: s[0] < turns, lambda s: (s[0] + 1, s[1] * 2), (0, state)
        )
        return state + 1, kept[1] + state

    graph = translated(step, floats(0, 4), np.int32(0), in_place={0: 0})
    path = tmp_path / "test.mindir"
    path.write_bytes(graph.mindir)
    state = floats(0, 4)
    variables = {"input0": mindspore.Tensor(state)}
    net = mindspore.nn.GraphCell(mindspore.load(str(path)), params_init=variables)
    for turns in (0, 3, 1):
        (result,) = (net(mindspore.Tensor(np.int32(turns))),)
        result = result[0] if isinstance(result, tuple) else result
        np.testing.assert_allclose(result.asnumpy(), state * 2**turns + state, rtol=1e-6)
        state = state + 1
        np.testing.assert_allclose(net.parameters_dict()["input0"].asnumpy(), state, rtol=1e-6)


def test_what_mindspore_lacks_is_one_error_with_its_line():
    from lowering.errors import LoweringError

    for function, what in [
        (lambda x: jax.lax.conv(x, x, (1, 1), "SAME"), "the operation convolution"),
        (lambda x: jax.lax.reduce(x > 0, False, jax.lax.bitwise_xor, (1,)), "reduction by"),
        (lambda x: jax.lax.population_count(x.astype(np.int32)), "the operation popcnt"),
    ]:
        refusal = rf"test_operations\.py:\d+: .*does not support {what}"
        with pytest.raises(LoweringError, match=refusal):
            translated(function, floats(0, 1, 1, 3, 3))
