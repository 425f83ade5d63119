"""Folders with weights in FP8, FP4 or MXFP4, read as if they were not quantized.

Only the requested part of an array is read and dequantized, a few million values at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from graphtrain.config.hf_config import read_config_json
from graphtrain.config.hf_quantization import WeightQuantization, read_quantization
from graphtrain.errors import WeightsError
from graphtrain.weights.files import DTYPES, FolderFiles, Index, SafetensorsFiles, numpy_dtype_of
from graphtrain.weights.quantized_formats import DamagedValues
from graphtrain.weights.quantized_weights import fp8_weights, mxfp4_weights
from graphtrain.weights.weight_folder import open_weight_files
from sharding_rules.documents import DocumentError

# What tensors tell of a quantization: the ends of their names, their dtypes, and the method.
_SIGNS = (
    ("", ("F8_E4M3", "F8_E5M2"), "FP8"),
    ("_blocks", ("U8",), "MXFP4"),
    (".qweight", ("I32",), "GPTQ or AWQ"),
    (".weight", ("U8", "I8"), "bytes, as by bitsandbytes or with FP4"),
)


def open_hugging_face(directory: Path) -> FolderFiles:
    """Open the weights of a folder that transformers can load; quantized ones are dequantized.

    Raises:
        WeightsError: there are no weights, or they are damaged or quantized in an unsupported way.
    """
    files, config = open_weight_files(directory), _config(directory)
    quantization = read_quantization(config)
    if quantization is None:
        if isinstance(files, SafetensorsFiles):
            _refuse_undeclared(files, files.names, directory, "no quantization_config")
        return files
    if not isinstance(files, SafetensorsFiles):
        raise WeightsError(
            f"{directory}: quantized weights are read from .safetensors only, and these are .bin; "
            "save the model with transformers first"
        )
    dequantized = DequantizedFiles(files, quantization, _dtype(config))
    declared = f"quant_method = {quantization.method!r}"
    _refuse_undeclared(files, dequantized.stored_as_they_are, directory, declared)
    return dequantized


def _refuse_undeclared(
    files: SafetensorsFiles, names: Iterable[str], directory: Path, declared: str
) -> None:
    """Refuse weights that look quantized, though config.json does not say so.

    Args:
        files: The folder.
        names: Tensors that would be read as they are.
        directory: The folder.
        declared: What config.json says.

    Raises:
        WeightsError: there are such weights.
    """
    for name in names:
        for ending, codes, method in _SIGNS:
            if name.endswith(ending) and files.code(name) in codes:
                raise WeightsError(
                    f"{files.path(name)}: {name} is stored in {method} (dtype {files.code(name)}), "
                    f"but {directory}/config.json has {declared}; get config.json again, which "
                    "says how the weights are quantized"
                )


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
        find = fp8_weights if quantization.method == "fp8" else mxfp4_weights
        self._weights = find(files, quantization)
        used = {name for weight in self._weights.values() for name in weight.stored_names}
        self.stored_as_they_are = tuple(name for name in files.names if name not in used)
        self.names = (*self._weights, *self.stored_as_they_are)

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
            path = self._files.path(weight.stored_names[0])
            raise WeightsError(
                f"{path}: {name} contains {error}; the file is damaged: get it again"
            ) from error

    def constant(self, name: str) -> np.ndarray:
        return self.read(name) if name in self._weights else self._files.constant(name)
