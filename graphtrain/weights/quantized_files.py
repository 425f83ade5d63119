"""Folders with weights in FP8 or MXFP4, read as if they were not quantized.

Only the requested part of an array is read and dequantized, a few million values at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from graphtrain.config.hf_config import read_config_json
from graphtrain.config.hf_quantization import WeightQuantization, read_quantization
from graphtrain.errors import WeightsError
from graphtrain.weights.files import (
    DTYPES,
    FolderFiles,
    Index,
    SafetensorsFiles,
    numpy_dtype_of,
    open_weight_files,
)
from graphtrain.weights.quantized_formats import (
    MX_BLOCK,
    DamagedValues,
    dequantize_fp8,
    dequantize_mxfp4,
    exponents_to_scales,
)
from sharding_rules.documents import DocumentError

_CHUNK = 4 << 20  # values that are dequantized at once
_E4M3, _E8M0, _BYTE = "F8_E4M3", "F8_E8M0", "U8"  # dtypes of safetensors
_SCALE_DTYPES = (*DTYPES, _E8M0)
_ACTIVATION_SCALES = ("activation_scale", "input_scale")  # with which engines quantize activations


def open_hugging_face(directory: Path) -> FolderFiles:
    """Open the weights of a folder that transformers can load; quantized ones are dequantized.

    Raises:
        WeightsError: there are no weights, or they are damaged or quantized in an unsupported way.
    """
    files, config = open_weight_files(directory), _config(directory)
    quantization = read_quantization(config)
    if quantization is None:
        return files
    if not isinstance(files, SafetensorsFiles):
        raise WeightsError(
            f"{directory}: quantized weights are read from .safetensors only, and these are .bin; "
            "save the model with transformers first"
        )
    return DequantizedFiles(files, quantization, _dtype(config))


def _config(directory: Path) -> dict[str, Any]:
    """Return config.json; a folder without one has weights that are not quantized."""
    path = directory / "config.json"
    if not path.is_file():
        return {}
    try:
        return read_config_json(path)
    except (OSError, DocumentError) as error:
        raise WeightsError(f"{path} cannot be used: {error}") from error


def _dtype(config: Mapping[str, Any]) -> np.dtype:
    """Return the dtype of the model, in which transformers dequantizes its weights."""
    name = str(config.get("dtype") or config.get("torch_dtype"))
    is_supported = name in {str(dtype) for dtype in DTYPES.values()}
    return numpy_dtype_of("config.json: dtype", name if is_supported else "bfloat16")


class DequantizedFiles:
    """Arrays of a folder; those that are quantized have the names and values of the model's.

    Args:
        files: The folder.
        quantization: How its weights are quantized.
        dtype: Of the dequantized weights.

    Raises:
        WeightsError: a weight has no scales, or they have another shape than it needs.
    """

    def __init__(
        self, files: SafetensorsFiles, quantization: WeightQuantization, dtype: np.dtype
    ) -> None:
        self._files, self._dtype = files, dtype
        find = _fp8_weights if quantization.method == "fp8" else _mxfp4_weights
        self._weights = find(files, quantization)
        used = {name for weight in self._weights.values() for name in weight.stored_names}
        others = (name for name in files.names if name not in used)
        self.names = (*self._weights, *others)

    def dtype(self, name: str) -> np.dtype:
        return self._dtype if name in self._weights else self._files.dtype(name)

    def shape(self, name: str) -> tuple[int, ...]:
        weight = self._weights.get(name)
        return self._files.shape(name) if weight is None else weight.shape

    def read(self, name: str) -> np.ndarray:
        if name not in self._weights:
            return self._files.read(name)
        return self.part(name, (slice(None),) * len(self.shape(name)))

    def part(self, name: str, index: Index) -> np.ndarray:
        weight = self._weights.get(name)
        if weight is None:
            return self._files.part(name, index)
        ranges = [range(size)[one] for size, one in zip(weight.shape, index, strict=True)]
        try:
            return weight.part(ranges, self._dtype)
        except DamagedValues as error:
            raise WeightsError(
                f"{name} contains {error}; the file is damaged: get it again"
            ) from error

    def constant(self, name: str) -> np.ndarray:
        return self.read(name) if name in self._weights else self._files.constant(name)


class _Weight(Protocol):
    """Weight that is stored as several tensors."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def stored_names(self) -> tuple[str, ...]: ...

    def part(self, ranges: list[range], dtype: np.dtype) -> np.ndarray: ...


@dataclass(frozen=True)
class _Fp8Weight:
    """Weight in e4m3 with a scale for each block of rows and columns."""

    files: SafetensorsFiles
    stored_names: tuple[str, ...]  # values, scales, and scales of activations
    shape: tuple[int, ...]  # (..., rows, columns)
    block: tuple[int, int]  # rows and columns of a scale

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
                result[place][begin : begin + size] = dequantize_fp8(
                    np.asarray(values[inner][_slice(chunk), _slice(columns)]),
                    scales[inner][row_blocks[:, None], column_blocks],
                    dtype,
                )
        return result

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


def _fp8_weights(files: SafetensorsFiles, quantization: WeightQuantization) -> dict[str, _Weight]:
    available, weights = set(files.names), dict[str, _Weight]()
    for name in files.names:
        if files.code(name) != _E4M3:
            continue
        scales = f"{name}{quantization.scale_suffix}"
        if scales not in available:
            raise WeightsError(
                f"{name} is in FP8 and the folder has no {scales}: its scales are missing, or have "
                "a name that graphtrain does not know"
            )
        stem = name.removesuffix("weight") if name.endswith(".weight") else f"{name}_"
        ignored = [stem + suffix for suffix in _ACTIVATION_SCALES if stem + suffix in available]
        shape, block = files.shape(name), _block_of(files, name, scales, quantization)
        weights[name] = _Fp8Weight(files, (name, scales, *ignored), shape, block)
    return weights


def _block_of(
    files: SafetensorsFiles, name: str, scales: str, quantization: WeightQuantization
) -> tuple[int, int]:
    """Return the rows and columns that a scale is of.

    Raises:
        WeightsError: the scales have another dtype or shape than the weight needs.
    """
    shape, found, code = files.shape(name), files.shape(scales), files.code(scales)
    if code not in (*_SCALE_DTYPES, *([_BYTE] if quantization.scales_are_exponents else [])):
        raise WeightsError(f"{scales} has dtype {code}, which is not one of scales of FP8 weights")
    if len(shape) < 2 or 0 in shape:
        raise WeightsError(f"{name} of shape {shape} is in FP8, and only matrices are supported")
    *leading, rows, columns = shape
    forms = [quantization.block] if quantization.block else [(rows, columns), (1, columns)]
    for block in forms:
        grid = (*leading, math.ceil(rows / block[0]), math.ceil(columns / block[1]))
        is_one = math.prod(grid) == 1 and math.prod(found) == 1
        if found == grid or is_one:
            return block
    kind = f"blocks of {quantization.block}" if quantization.block else "one scale, or one a row"
    raise WeightsError(
        f"{scales} has shape {found}, which does not match {name} of shape {shape} with {kind}"
    )


@dataclass(frozen=True)
class _Mxfp4Weight:
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


def _mxfp4_weights(files: SafetensorsFiles, _: WeightQuantization) -> dict[str, _Weight]:
    weights: dict[str, _Weight] = {}
    available = set(files.names)
    for name in files.names:
        if not name.endswith("_blocks"):
            continue
        weight = name.removesuffix("_blocks")
        scales = f"{weight}_scales"
        if scales not in available:
            raise WeightsError(f"{name} is in MXFP4 and the folder has no {scales}")
        weights[weight] = _Mxfp4Weight(files, (name, scales), _mxfp4_shape(files, name, scales))
    return weights


def _mxfp4_shape(files: SafetensorsFiles, name: str, scales: str) -> tuple[int, int, int]:
    """Return the shape of a weight, (experts, in, out).

    Raises:
        WeightsError: its tensors have other dtypes or shapes.
    """
    shape, found = files.shape(name), files.shape(scales)
    codes = files.code(name), files.code(scales)
    if codes not in ((_BYTE, _BYTE), (_BYTE, _E8M0)):
        raise WeightsError(f"{name} and {scales} have the dtypes {codes} instead of {_BYTE}")
    if len(shape) != 4 or shape[3] != MX_BLOCK // 2 or 0 in shape:
        raise WeightsError(
            f"{name} has shape {shape} instead of (experts, out, in / {MX_BLOCK}, {MX_BLOCK // 2})"
        )
    if found != shape[:3]:
        raise WeightsError(
            f"{scales} has shape {found} instead of {shape[:3]}, one for each block of {name}"
        )
    return shape[0], shape[2] * MX_BLOCK, shape[1]


def _slice(one: range) -> slice:
    """Return the slice of an axis that a range with a positive step enumerates."""
    return slice(one.start, one.stop, one.step)
