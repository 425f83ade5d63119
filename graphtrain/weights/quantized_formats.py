"""Dequantization of weights that are published in FP8, FP4 and MXFP4.

Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5.2 (e4m3, e2m1) and 5.4 (e8m0).
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

MX_BLOCK = 32  # values that share an exponent; two in a byte, the lower four bits first
_BIAS, _NAN = 127, 255  # of e8m0
_E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
_E2M1 = np.array([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], np.float32)
_PAIRS = np.stack([_E2M1[np.arange(256) & 15], _E2M1[np.arange(256) >> 4]], axis=-1)


class DamagedValues(ValueError):
    """Codes or scales that no quantizer writes."""


def exponents_to_scales(exponents: np.ndarray) -> np.ndarray:
    """Return e8m0 exponents, uint8, as float32 powers of two.

    Raises:
        DamagedValues: an exponent stands for NaN.
    """
    if (exponents == _NAN).any():
        raise DamagedValues("an e8m0 scale of 255, which is NaN")
    return np.ldexp(np.float32(1), exponents.astype(np.int32) - _BIAS)


def dequantize_fp8(codes: np.ndarray, scales: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Multiply e4m3 values by their scales in float32, and round once.

    Args:
        codes: e4m3 values as uint8, of any shape.
        scales: float32; broadcast to that shape.
        dtype: of the result.

    Raises:
        DamagedValues: a value or scale is NaN, a scale is infinite or negative, or zero before a
            value that is not, or a result is too large for the dtype.
    """
    _check_scales(scales)
    values = _E4M3[codes]
    if np.isnan(values).any():
        raise DamagedValues("an e4m3 value of 0x7f or 0xff, which is NaN")
    return _scaled(values, scales, dtype)


def dequantize_fp4(
    pairs: np.ndarray, columns: slice, scales: np.ndarray, dtype: np.dtype
) -> np.ndarray:
    """Multiply e2m1 values by their scales in float32, and round once.

    Args:
        pairs: two values in a byte, the lower four bits first, uint8, (rows, bytes).
        columns: of the values in these bytes.
        scales: float32, (rows, columns).
        dtype: of the result.

    Raises:
        DamagedValues: as of `dequantize_fp8`.
    """
    _check_scales(scales)
    values = _PAIRS[pairs].reshape(len(pairs), 2 * pairs.shape[1])[:, columns]
    return _scaled(values, scales, dtype)


def _check_scales(scales: np.ndarray) -> None:
    if not (np.isfinite(scales) & (scales >= 0)).all():
        raise DamagedValues("a scale that is NaN, infinite or negative")


def _scaled(values: np.ndarray, scales: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Multiply values in place by their scales, and round the products."""
    if not scales.all() and ((scales == 0) & (values != 0)).any():
        raise DamagedValues("a scale of zero for values that are not zero")
    with np.errstate(over="ignore"):
        values *= scales
    return _rounded(values, dtype)


def dequantize_mxfp4(codes: np.ndarray, exponents: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return the values of MXFP4 blocks, exact in float32 and bfloat16.

    Args:
        codes: pairs of e2m1 values, uint8, (..., blocks, 16).
        exponents: e8m0, uint8, (..., blocks).
        dtype: of the result.

    Returns:
        Values (..., blocks * 32).

    Raises:
        DamagedValues: an exponent stands for NaN, or a result is too large for the dtype.
    """
    scales = exponents_to_scales(exponents)
    values = _PAIRS[codes].reshape(*codes.shape[:-1], MX_BLOCK)
    with np.errstate(over="ignore"):
        values *= scales[..., None]
    return _rounded(values.reshape(*codes.shape[:-2], codes.shape[-2] * MX_BLOCK), dtype)


def _rounded(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    with np.errstate(over="ignore"):
        rounded = values.astype(dtype)
    if not np.isfinite(rounded).all():
        raise DamagedValues(f"a value that is too large for {dtype.name} after scaling")
    return rounded
