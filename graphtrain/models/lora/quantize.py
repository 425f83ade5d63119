"""Weights in few bits: each block of neighbours as codes and one scale, its largest magnitude.

Blocks lie along the last axis, so that they are the same however a mesh splits the others. Imports
no JAX: a run makes codes on the host while it reads weights, an array's part at a time.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

Kind = Literal["int8", "nf4"]

# Quantiles of a normal distribution, the largest scaled to 1, with an exact zero.
# Source: Dettmers et al. 2023, "QLoRA", appendix E, https://arxiv.org/abs/2305.14314
NF4 = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    np.float32,
)
_LEVELS = 127  # of int8, on each side of zero
_LARGEST = 64  # numbers of a block; QLoRA's choice for weights

# The most that a weight is off, over the largest magnitude of its block: half of the widest gap
# between neighbouring values.
WORST = {"int8": 0.5 / _LEVELS, "nf4": float(np.diff(NF4).max()) / 2}


def block_of(size: int) -> int:
    """Numbers in a block of an axis: as many as 64, of those that divide it."""
    return max(n for n in range(1, min(size, _LARGEST) + 1) if size % n == 0)


def quantise(weights: np.ndarray, kind: Kind, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes and float32 scales of weights (..., n).

    Codes of int8 are (..., n); of nf4 (..., n / 2), a pair in each byte, the first in its low bits.
    Scales are (..., n / block).
    """
    blocks = weights.astype(np.float32).reshape(*weights.shape[:-1], -1, block)
    scales = np.abs(blocks).max(-1)
    relative = blocks / np.where(scales == 0, 1, scales)[..., None]
    if kind == "int8":
        return np.rint(relative * _LEVELS).astype(np.int8).reshape(weights.shape), scales
    nearest = np.searchsorted((NF4[1:] + NF4[:-1]) / 2, relative).astype(np.uint8)
    pairs = nearest.reshape(*weights.shape[:-1], -1, 2)
    return pairs[..., 0] | pairs[..., 1] << 4, scales


def restore(codes: np.ndarray, scales: np.ndarray, kind: Kind, block: int) -> np.ndarray:
    """The float32 weights that codes and scales stand for, as a step computes with them."""
    if kind == "int8":
        relative = codes.astype(np.float32) * np.float32(1 / _LEVELS)
    else:
        pairs = np.stack([codes & 15, codes >> 4], -1)
        relative = NF4[pairs.reshape(*codes.shape[:-1], -1)]
    return relative * np.repeat(scales, block, -1)


def rounded(weights: np.ndarray, kind: Kind) -> np.ndarray:
    """What is left of weights (..., n) after codes and scales."""
    block = block_of(weights.shape[-1])
    return restore(*quantise(weights, kind, block), kind, block)
