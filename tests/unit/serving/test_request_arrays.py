"""Sampling parameters as the arrays of a program."""

import pytest

from graphtrain.run.serving.engine_protocol import SamplingParameters
from graphtrain.run.serving.request_arrays import request_arrays


def word(seed: int) -> int:
    return int(request_arrays(SamplingParameters(seed=seed), (), 8, 8)["seed"])


def test_a_seed_of_32_bits_is_itself():
    assert [word(seed) for seed in (0, 7, 2**32 - 1)] == [0, 7, 2**32 - 1]


def test_longer_seeds_with_the_same_low_bits_differ():
    seeds = [5, 5 + 2**32, 5 + 2**33, 5 + 2**63, 5 - 2**32, -5, 10**30]
    assert len(set(map(word, seeds))) == len(seeds)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_gives_the_same_bits_each_time(seed):
    assert word(seed) == word(seed)
