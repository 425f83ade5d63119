"""Weights that are stored as several tensors: values in FP8 or FP4, and their scales."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from graphtrain.config.hf_quantization import WeightQuantization
from graphtrain.errors import WeightsError
from graphtrain.weights.files import DTYPES, SafetensorsFiles
from graphtrain.weights.quantized_formats import (
    MX_BLOCK,
    dequantize_fp4,
    dequantize_fp8,
    dequantize_mxfp4,
    exponents_to_scales,
)

_CHUNK = 4 << 20  # values that are dequantized at once
_E4M3, _E5M2, _E8M0, _BYTE = "F8_E4M3", "F8_E5M2", "F8_E8M0", "U8"  # dtypes of safetensors
_PAIRS = ("I8", _BYTE)  # two values of FP4 in a byte
_SCALE_DTYPES = (*DTYPES, _E8M0)
_ACTIVATION_SCALES = ("activation_scale", "input_scale")  # with which engines quantize activations


class QuantizedWeight(Protocol):
    """Weight that is stored as several tensors."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def stored_names(self) -> tuple[str, ...]: ...

    def part(self, ranges: list[range], dtype: np.dtype) -> np.ndarray: ...


@dataclass(frozen=True)
class Fp8Weight:
    """Weight in e4m3, or in pairs of e2m1, with a scale for each block of rows and columns."""

    files: SafetensorsFiles
    stored_names: tuple[str, ...]  # values, scales, and scales of activations
    shape: tuple[int, ...]  # (..., rows, columns)
    block: tuple[int, int]  # rows and columns of a scale
    is_fp4: bool = False

    def part(self, ranges: list[range], dtype: np.dtype) -> np.ndarray:
        values, scales = self.files.codes(self.stored_names[0]), self._scales()
        *leading, rows, columns = ranges
        result = np.empty([len(one) for one in ranges], dtype)
        size = max(1, _CHUNK // max(1, len(columns)))
        column_blocks = np.array(columns, int) // self.block[1]
        for place in np.ndindex(*result.shape[:-2]):
            inner = tuple(one[i] for one, i in zip(leading, place, strict=True))
            for begin in range(0, len(rows), size):
                chunk = rows[begin : begin + size]
                row_blocks = np.array(chunk, int) // self.block[0]
                block_scales = scales[inner][row_blocks[:, None], column_blocks]
                result[place][begin : begin + size] = self._values(
                    values[inner], chunk, columns, block_scales, dtype
                )
        return result

    def _values(
        self,
        codes: np.ndarray,
        rows: range,
        columns: range,
        scales: np.ndarray,
        dtype: np.dtype,
    ) -> np.ndarray:
        """Return dequantized values of a matrix; in FP4, a byte of codes has two columns."""
        if not self.is_fp4:
            return dequantize_fp8(np.asarray(codes[_slice(rows), _slice(columns)]), scales, dtype)
        if not columns:
            return np.empty((len(rows), 0), dtype)
        first, last = columns[0] // 2, columns[-1] // 2
        pairs = np.asarray(codes[_slice(rows), first : last + 1])
        inside = slice(columns[0] - 2 * first, columns[-1] + 1 - 2 * first, columns.step)
        return dequantize_fp4(pairs, inside, scales, dtype)

    def _scales(self) -> np.ndarray:
        """Return the scales in float32, with an axis for each axis of the weight."""
        _, name, *_ = self.stored_names
        if self.files.code(name) in (_E8M0, _BYTE):
            scales = exponents_to_scales(np.asarray(self.files.codes(name)))
        else:
            scales = self.files.read(name).astype(np.float32)
        *leading, rows, columns = self.shape
        grid = (*leading, -(-rows // self.block[0]), -(-columns // self.block[1]))
        return np.broadcast_to(scales if scales.size == 1 else scales.reshape(grid), grid)


def fp8_weights(
    files: SafetensorsFiles, quantization: WeightQuantization
) -> dict[str, QuantizedWeight]:
    """Return the weights in FP8, and those of experts in FP4, by name.

    Raises:
        WeightsError: a weight has no scales, several, or scales of another shape than it needs.
    """
    available, weights = set(files.names), dict[str, QuantizedWeight]()
    for name in files.names:
        code = files.code(name)
        if code == _E5M2:
            raise WeightsError(f"{files.path(name)}: {name} is in FP8 as e5m2; only e4m3 is read")
        names = _scale_names(name, quantization)
        scales = [one for one in names if one in available]
        is_fp4 = quantization.experts_are_fp4 and code in _PAIRS and bool(scales)
        if code != _E4M3 and not is_fp4:
            continue
        if len(scales) != 1:
            found = (
                f"has the scales {' and '.join(scales)}"
                if scales
                else (
                    f"the folder has no {names[0]}: its scales are missing, or have a name that "
                    "graphtrain does not know"
                )
            )
            raise WeightsError(f"{files.path(name)}: {name} is in FP8 and {found}")
        stem = name.removesuffix("weight") if name.endswith(".weight") else f"{name}_"
        ignored = [stem + suffix for suffix in _ACTIVATION_SCALES if stem + suffix in available]
        shape = files.shape(name)
        if is_fp4:
            shape = (*shape[:-1], 2 * shape[-1])
        block = _block_of(files, name, shape, scales[0], quantization, is_fp4=is_fp4)
        weights[name] = Fp8Weight(files, (name, scales[0], *ignored), shape, block, is_fp4)
    return weights


def _scale_names(name: str, quantization: WeightQuantization) -> list[str]:
    """Return the names that the scales of a weight may have.

    Source: DeepSeek-V4 and Mistral Large 4 by FineGrainedFP8HfQuantizer of transformers.
    """
    names = [f"{name}{quantization.scale_suffix}"]
    if quantization.scale_suffix == "_scale_inv" and name.endswith(".weight"):
        stem = name.removesuffix("weight")
        names += [f"{stem}scale", f"{stem}qscale_weight"]
    return names


def _block_of(
    files: SafetensorsFiles,
    name: str,
    shape: tuple[int, ...],
    scales: str,
    quantization: WeightQuantization,
    *,
    is_fp4: bool,
) -> tuple[int, int]:
    """Return the rows and columns that a scale is of.

    Weights in FP4 have blocks of their own, whose size follows from the number of scales.

    Raises:
        WeightsError: the scales have another dtype or shape than the weight needs.
    """
    found, code, path = files.shape(scales), files.code(scales), files.path(scales)
    if code not in (*_SCALE_DTYPES, *([_BYTE] if quantization.scales_are_exponents else [])):
        raise WeightsError(
            f"{path}: {scales} has dtype {code}, which is not one of scales of FP8 weights"
        )
    if len(shape) < 2 or 0 in shape:
        raise WeightsError(
            f"{files.path(name)}: {name} of shape {shape} is in FP8, and only matrices are "
            "supported"
        )
    *leading, rows, columns = shape
    if is_fp4:
        forms = [(1, MX_BLOCK)]
    else:
        forms = [quantization.block] if quantization.block else [(rows, columns), (1, columns)]
    for block in forms:
        grid = (*leading, math.ceil(rows / block[0]), math.ceil(columns / block[1]))
        is_one = math.prod(grid) == 1 and math.prod(found) == 1
        if found == grid or is_one:
            return block
    kind = f"blocks of {forms[0]}" if len(forms) == 1 else "one scale, or one a row"
    raise WeightsError(
        f"{path}: {scales} has shape {found}, which does not match {name} of shape {shape} with "
        f"{kind}"
    )


@dataclass(frozen=True)
class Mxfp4Weight:
    """Weight of experts, (experts, in, out), stored as (experts, out, in) in blocks of `in`."""

    files: SafetensorsFiles
    stored_names: tuple[str, ...]  # blocks (experts, out, in / 32, 16) and scales without the last
    shape: tuple[int, ...]

    def part(self, ranges: list[range], dtype: np.dtype) -> np.ndarray:
        blocks, scales = (self.files.codes(name) for name in self.stored_names)
        experts, inputs, outputs = ranges
        result = np.empty([len(one) for one in ranges], dtype)
        if not result.size:
            return result
        groups = slice(inputs[0] // MX_BLOCK, inputs[-1] // MX_BLOCK + 1)
        first = groups.start * MX_BLOCK
        inner = slice(inputs[0] - first, inputs[-1] + 1 - first, inputs.step)
        size = max(1, _CHUNK // (MX_BLOCK * (groups.stop - groups.start)))
        for place, expert in enumerate(experts):
            for begin in range(0, len(outputs), size):
                index = expert, _slice(outputs[begin : begin + size]), groups
                values = dequantize_mxfp4(
                    np.asarray(blocks[index]), np.asarray(scales[index]), dtype
                )
                result[place, :, begin : begin + size] = values[:, inner].T
        return result


def mxfp4_weights(files: SafetensorsFiles, _: WeightQuantization) -> dict[str, QuantizedWeight]:
    """Return the weights in MXFP4 by name.

    Raises:
        WeightsError: a weight has no scales or no blocks, tensors of other shapes, or is stored
            without quantization too.
    """
    weights: dict[str, QuantizedWeight] = {}
    available = set(files.names)
    for name in files.names:
        weight, part = name.rpartition("_")[::2]
        blocks, scales = f"{weight}_blocks", f"{weight}_scales"
        if part == "scales" and blocks not in available:
            raise WeightsError(f"{files.path(name)}: {name} is of MXFP4 and {blocks} is missing")
        if part != "blocks":
            continue
        if scales not in available:
            raise WeightsError(
                f"{files.path(name)}: {name} is in MXFP4 and the folder has no {scales}"
            )
        if weight in available:
            raise WeightsError(
                f"{files.path(name)}: the folder has {name} and {weight}, two sources of one "
                "array; remove one of them"
            )
        weights[weight] = Mxfp4Weight(files, (name, scales), _mxfp4_shape(files, name, scales))
    return weights


def _mxfp4_shape(files: SafetensorsFiles, name: str, scales: str) -> tuple[int, int, int]:
    """Return the shape of a weight, (experts, in, out).

    Raises:
        WeightsError: its tensors have other dtypes or shapes.
    """
    shape, found = files.shape(name), files.shape(scales)
    codes = files.code(name), files.code(scales)
    if codes not in ((_BYTE, _BYTE), (_BYTE, _E8M0)):
        raise WeightsError(
            f"{files.path(name)}: {name} and {scales} have the dtypes {codes} instead of {_BYTE}"
        )
    if len(shape) != 4 or shape[3] != MX_BLOCK // 2 or 0 in shape:
        raise WeightsError(
            f"{files.path(name)}: {name} has shape {shape} instead of (experts, out, "
            f"in / {MX_BLOCK}, {MX_BLOCK // 2})"
        )
    if found != shape[:3]:
        raise WeightsError(
            f"{files.path(scales)}: {scales} has shape {found} instead of {shape[:3]}, one for "
            f"each block of {name}"
        )
    return shape[0], shape[2] * MX_BLOCK, shape[1]


def _slice(one: range) -> slice:
    """Return the slice of an axis that a range with a positive step enumerates."""
    return slice(one.start, one.stop, one.step)
