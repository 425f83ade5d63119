"""Weights in few bits against their stated error, and part by part."""

import numpy as np
import pytest

from graphtrain.models.lora.quantize import (
    MAX_RELATIVE_ERROR,
    NF4,
    block_size,
    dequantize,
    fake_quantize,
    quantize,
)

WEIGHTS = np.random.default_rng(0).normal(0, 0.02, (5, 7, 192)).astype(np.float32)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_weights_are_off_by_no_more_than_half_a_gap(kind):
    blocks = WEIGHTS.reshape(5, 7, -1, 64)
    off = np.abs(blocks - fake_quantize(WEIGHTS, kind).reshape(blocks.shape)).max(-1)
    share = off / np.abs(blocks).max(-1)
    assert share.max() <= MAX_RELATIVE_ERROR[kind] * (1 + 1e-5)
    assert share.max() > MAX_RELATIVE_ERROR[kind] / 2  # the bound says something


def test_nf4_gives_every_value_of_its_table_back():
    codes, scales = quantize(3 * NF4[None], "nf4", 16)
    assert codes.shape == (1, 8) and scales.tolist() == [[3.0]]
    np.testing.assert_array_equal(dequantize(codes, scales, "nf4", 16), 3 * NF4[None])


def test_nf4_takes_the_nearest_value():
    halves = np.concatenate([NF4, np.random.default_rng(1).uniform(-1, 1, 48).astype(np.float32)])
    nearest = NF4[np.abs(halves[:, None] - NF4).argmin(1)]
    np.testing.assert_array_equal(fake_quantize(halves[None], "nf4")[0], nearest)


def test_a_block_of_zeros_stays_zero():
    for kind in ("int8", "nf4"):
        assert not fake_quantize(np.zeros((2, 64), np.float32), kind).any()


def test_blocks_divide_their_axis():
    assert [block_size(size) for size in (192, 128, 80, 48, 8, 11008)] == [64, 64, 40, 48, 8, 64]
