"""Draws by the unrolled Threefry beside JAX's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowering.tracing.threefry import UNROLLED_THREEFRY, threefry


@pytest.mark.parametrize("shape", [(), (7,), (3, 5, 2), (128, 65)])
def test_draws_are_those_of_jax(shape):
    mine, theirs = jax.random.key(5, impl=UNROLLED_THREEFRY), jax.random.key(5, impl="threefry2x32")
    np.testing.assert_array_equal(jax.random.normal(mine, shape), jax.random.normal(theirs, shape))
    for dtype in (np.uint8, np.uint32):
        drawn = jax.random.bits(mine, shape, dtype)
        np.testing.assert_array_equal(drawn, jax.random.bits(theirs, shape, dtype))


def test_a_batch_of_keys_draws_as_each_by_itself():
    keys = jax.random.split(jax.random.key(1, impl=UNROLLED_THREEFRY), 3)
    drawn = jax.vmap(lambda key: jax.random.bits(key, (4,)))(keys)
    assert [list(row) for row in drawn] == [list(jax.random.bits(key, (4,))) for key in keys]


def test_the_published_answers():
    """Source: Salmon et al., kat_vectors of Random123, threefry2x32 20"""
    ones = np.uint32(0xFFFFFFFF)
    answers = {
        np.uint32(0): (0x6B200159, 0x99BA4EFE),
        ones: (0x1CB996FC, 0xBB002BE7),
    }
    for word, answer in answers.items():
        assert (
            tuple(map(int, threefry(jnp.array([word, word]), jnp.array(word), jnp.array(word))))
            == answer
        )


def test_a_draw_keeps_nothing_beside_its_result():
    draw = jax.jit(lambda key: jax.random.normal(key, (256, 256)))
    lowered = draw.lower(jax.random.key(0, impl=UNROLLED_THREEFRY))
    assert "while" not in lowered.as_text()
    memory = lowered.compile().memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < 256 * 256
