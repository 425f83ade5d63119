"""Seeded permutations and samples, the same on every machine and with every NumPy version."""

import numpy as np

_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: separates neighbouring integers
_WORD = (1 << 64) - 1


def hash_indices(indices: np.ndarray, *salts: int) -> np.ndarray:
    """Hash each index with the salts to a uniform uint64.

    NumPy's generators may change their streams between versions. This function does not, so a run
    that is resumed years later reads the same data.

    Source: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators", figure 17
    (the finalizer of SplitMix64, once per salt), https://doi.org/10.1145/2714064.2660195
    """
    state = _splitmix64(indices.astype(np.uint64) + np.uint64(_GOLDEN))
    for salt in salts:
        state = _splitmix64(state ^ np.uint64((salt + 1) * _GOLDEN & _WORD))
    return state


def permutation(count: int, *salts: int) -> np.ndarray:
    """Return a permutation of the integers below `count`, determined by the salts."""
    # No two indices have the same hash, so any sorting algorithm gives the same permutation.
    return np.argsort(hash_indices(np.arange(count), *salts))


def sample_mask(indices: np.ndarray, fraction: float, *salts: int) -> np.ndarray:
    """Return a mask, True for about `fraction` of the indices, each decided independently."""
    return hash_indices(indices, *salts) / 2.0**64 < fraction


def _splitmix64(state: np.ndarray) -> np.ndarray:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
