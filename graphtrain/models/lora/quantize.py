"""Block-wise quantization of weights: each block is stored as codes and one scale.

The scale is the block's largest magnitude. Blocks lie along the last axis, so that they do not
depend on how a mesh shards the other axes. Imports no JAX: weights are quantized on the host while
they are read, one shard of an array at a time.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

QuantizationKind = Literal["int8", "nf4"]

# 4-bit NormalFloat: quantiles of a normal distribution scaled to [-1, 1], with an exact zero.
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
_LEVELS = 127  # int8 levels on each side of zero
_LARGEST = 64  # maximum weights per block; QLoRA's choice

# Maximum error of a weight relative to the largest magnitude of its block: half of the widest gap
# between adjacent levels.
MAX_RELATIVE_ERROR = {"int8": 0.5 / _LEVELS, "nf4": float(np.diff(NF4).max()) / 2}


def block_size(size: int) -> int:
    """Return the number of weights per block of an axis: the largest divisor up to 64."""
    return max(n for n in range(1, min(size, _LARGEST) + 1) if size % n == 0)


def quantize(
    weights: np.ndarray, kind: QuantizationKind, block: int
) -> tuple[np.ndarray, np.ndarray]:
    """Quantize weights (..., n) to codes and float32 scales.

    Codes of int8 are (..., n). Codes of nf4 are (..., n / 2), two in each byte, the first in the
    low bits. Scales are (..., n / block).
    """
    blocks = weights.astype(np.float32).reshape(*weights.shape[:-1], -1, block)
    scales = np.abs(blocks).max(-1)
    relative = blocks / np.where(scales == 0, 1, scales)[..., None]
    if kind == "int8":
        return np.rint(relative * _LEVELS).astype(np.int8).reshape(weights.shape), scales
    nf4_codes = np.searchsorted((NF4[1:] + NF4[:-1]) / 2, relative).astype(np.uint8)
    pairs = nf4_codes.reshape(*weights.shape[:-1], -1, 2)
    return pairs[..., 0] | pairs[..., 1] << 4, scales


def dequantize(
    codes: np.ndarray, scales: np.ndarray, kind: QuantizationKind, block: int
) -> np.ndarray:
    """Return the float32 weights of codes and scales, as a training step dequantizes them."""
    if kind == "int8":
        relative = codes.astype(np.float32) * np.float32(1 / _LEVELS)
    else:
        pairs = np.stack([codes & 15, codes >> 4], -1)
        relative = NF4[pairs.reshape(*codes.shape[:-1], -1)]
    return relative * np.repeat(scales, block, -1)


def fake_quantize(weights: np.ndarray, kind: QuantizationKind) -> np.ndarray:
    """Quantize and dequantize weights (..., n): return the values that quantization leaves."""
    block = block_size(weights.shape[-1])
    return dequantize(*quantize(weights, kind, block), kind, block)
