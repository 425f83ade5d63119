import jax
import numpy as np

from graphtrain.models.attention.positions import alibi_slopes, rotate


def test_rotation_multiplies_pairs_of_halves_by_a_complex_phase():
    x = np.asarray(jax.random.normal(jax.random.key(0), (2, 50, 3, 8)), np.float64)
    pairs = x[..., :4] + 1j * x[..., 4:]
    frequencies = 500_000.0 ** (-np.arange(4) / 4)
    turned = pairs * np.exp(1j * np.arange(50)[:, None, None] * frequencies)
    want = np.concatenate([turned.real, turned.imag], axis=-1)
    got = rotate(x.astype(np.float32), np.arange(50), np.float32(frequencies))
    np.testing.assert_allclose(got, want, atol=2e-5)  # angles near 50, in float32


def test_slopes_for_a_power_of_two_are_the_papers():
    assert alibi_slopes(8) == [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]
    np.testing.assert_allclose(alibi_slopes(16), 0.5 ** (np.arange(1, 17) / 2))


def test_slopes_for_other_numbers_fill_in_between():
    want = [*alibi_slopes(8), 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]
    np.testing.assert_allclose(alibi_slopes(12), want)
    np.testing.assert_allclose(alibi_slopes(3), [2**-4, 2**-8, 2**-2])
    assert alibi_slopes(1) == [2**-8]
