"""Weight files: safetensors and PyTorch's .bin.

Arrays are read one at a time with plain reads, because pages of a mapped file count as memory.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from graphtrain.errors import WeightsError
from graphtrain.weights.torch_arrays import as_numpy
from lowering.machine.extras import optional_import
from sharding_rules.documents import parse_object

Index = tuple[slice, ...]

DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
DTYPE_CODES = {dtype: code for code, dtype in DTYPES.items()}
_INTEGERS = {
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
# Dtypes that a file may have; integers are no weights, unless config.json says so.
FILE_CODES = DTYPE_CODES | {dtype: code for code, dtype in _INTEGERS.items()}
_TORCH = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_MOST_HEADER = 100 << 20  # bytes; the limit of the safetensors library


class WeightFiles(Protocol):
    """Arrays by name, in files of one folder."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all arrays."""
        ...

    def dtype(self, name: str) -> np.dtype:
        """Return the dtype of an array.

        Raises:
            WeightsError: the dtype is not supported.
        """
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of an array."""
        ...

    def read(self, name: str) -> np.ndarray:
        """Return the complete array, in memory of its own."""
        ...


class FolderFiles(WeightFiles, Protocol):
    """Arrays in a folder that transformers can load."""

    def part(self, name: str, index: Index) -> np.ndarray:
        """Return a part of an array, and read only that part if the format allows it."""
        ...

    def constant(self, name: str) -> np.ndarray:
        """Return an array that is no weight, and may consist of integers."""
        ...


@dataclass(frozen=True)
class _Entry:
    path: Path
    code: str  # of the dtype
    shape: tuple[int, ...]
    offset: int  # bytes from the beginning of the file


class SafetensorsFiles:
    """Arrays in safetensors files.

    Raises:
        WeightsError: a file is damaged or missing.
    """

    def __init__(self, paths: list[Path]) -> None:
        self._entries: dict[str, _Entry] = {}
        self.tied: dict[str, str] = {}  # name of a tensor left out: name of the same tensor
        for path in paths:
            found, metadata = _read_header(path)
            self.tied |= metadata
            for name in found.keys() & self._entries.keys():
                raise _stored_twice(name, self.path(name), path)
            self._entries |= found

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def dtype(self, name: str) -> np.dtype:
        return _supported_dtype(name, self._entries[name].code)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def read(self, name: str) -> np.ndarray:
        entry = self._entries[name]
        count = math.prod(entry.shape)
        array = np.fromfile(entry.path, self.dtype(name), count, offset=entry.offset)
        return array.reshape(entry.shape)

    def path(self, name: str) -> Path:
        """Return the file that an array is in."""
        return self._entries[name].path

    def code(self, name: str) -> str:
        """Return the dtype as the format writes it, for example F8_E4M3."""
        return self._entries[name].code

    def codes(self, name: str) -> np.memmap:
        """Return the bytes of an array of one-byte elements, which are read when used."""
        entry = self._entries[name]
        return np.memmap(entry.path, np.uint8, "r", entry.offset, entry.shape)

    def constant(self, name: str) -> np.ndarray:
        entry = self._entries[name]
        dtype = _INTEGERS.get(entry.code) or self.dtype(name)
        array = np.fromfile(entry.path, dtype, math.prod(entry.shape), offset=entry.offset)
        return array.reshape(entry.shape)

    def part(self, name: str, index: Index) -> np.ndarray:
        entry = self._entries[name]
        mapped = np.memmap(entry.path, self.dtype(name), "r", entry.offset, entry.shape)
        return np.array(mapped[index])


def _read_header(path: Path) -> tuple[dict[str, _Entry], dict[str, str]]:
    """Return the location of each array in a file that the library has validated, and metadata."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np"):
            pass
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = parse_object(file.read(min(length, _MOST_HEADER)))
    except (OSError, SafetensorError, ValueError) as error:
        raise WeightsError(f"{path} is not a complete safetensors file: {error}") from error
    metadata = header.pop("__metadata__", None) or {}
    entries = {
        name: _Entry(
            path,
            entry["dtype"],
            tuple(entry["shape"]),
            8 + length + entry["data_offsets"][0],
        )
        for name, entry in header.items()
    }
    return entries, metadata


class BinFiles:
    """Arrays in PyTorch's .bin files, loaded with weights_only, so that no code in them runs.

    Raises:
        WeightsError: PyTorch is not installed, or cannot load a file with weights_only.
    """

    def __init__(self, paths: list[Path]) -> None:
        self.tied: dict[str, str] = {}  # these files contain all names of a tensor
        self._where: dict[str, Path] = {}
        self._about: dict[str, tuple[str, tuple[int, ...]]] = {}
        for path in paths:
            for name, tensor in _load_bin(path).items():
                if name in self._where:
                    raise _stored_twice(name, self._where[name], path)
                self._where[name] = path
                kind = str(tensor.dtype).removeprefix("torch.")
                self._about[name] = _TORCH.get(kind, kind), tuple(tensor.shape)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._where)

    def path(self, name: str) -> Path:
        """Return the file that an array is in."""
        return self._where[name]

    def dtype(self, name: str) -> np.dtype:
        return _supported_dtype(name, self._about[name][0])

    def shape(self, name: str) -> tuple[int, ...]:
        return self._about[name][1]

    def read(self, name: str) -> np.ndarray:
        # The file is mapped again for each array: mapped pages stay in memory until it is closed.
        tensor = _load_bin(self._where[name])[name]
        return as_numpy(tensor, self.dtype(name)).copy()

    def part(self, name: str, index: Index) -> np.ndarray:
        return self.read(name)[index]

    def constant(self, name: str) -> np.ndarray:
        tensor = _load_bin(self._where[name])[name]
        return self.read(name) if tensor.is_floating_point() else tensor.numpy().copy()


def numpy_dtype_of(name: str, kind: str) -> np.dtype:
    """Return the NumPy dtype for PyTorch's name of a dtype.

    Args:
        name: name of the array in errors.
        kind: PyTorch's name, for example "bfloat16".

    Raises:
        WeightsError: the dtype is not supported.
    """
    return _supported_dtype(name, _TORCH.get(kind, kind))


def first_names(names: list[str]) -> str:
    """Return the first three names, and the number of the others, for an error message."""
    suffix = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + suffix


def _load_bin(path: Path) -> Mapping[str, Any]:
    with optional_import(f"{path}: a .bin file", "bin"):
        import torch
    try:
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # files from before PyTorch 1.6 cannot be mapped
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the unpickler interprets damaged bytes, and may raise anything
        raise unloadable(path, error) from error
    if not isinstance(loaded, Mapping):
        raise WeightsError(
            f"{path} contains a {type(loaded).__name__} instead of a dict of tensors"
        )
    return {name: tensor for name, tensor in loaded.items() if isinstance(tensor, torch.Tensor)}


def unloadable(path: Path, error: Exception) -> WeightsError:
    """Return the error for a file that PyTorch refuses or fails to load.

    PyTorch's own message advises to load the file with weights_only=False, which runs its code.
    """
    lines = [line for line in str(error).splitlines() if line.strip()]
    cause = lines[0] if lines else type(error).__name__
    for index, line in enumerate(lines[:-1]):
        if line.endswith("WeightsUnpickler error: "):
            cause = lines[index + 1]
    if "weights_only" in cause:
        cause = "it is not a pickle of tensors"
    return WeightsError(
        f"{path} cannot be loaded with weights_only=True: {cause.strip()[:200]}; it is damaged, or "
        "contains objects that could run code. Get the file again, or the model as safetensors"
    )


def _supported_dtype(name: str, code: str) -> np.dtype:
    if code not in DTYPES:
        raise WeightsError(
            f"{name} has dtype {code}, which is not supported; supported: {', '.join(_TORCH)}"
        )
    return DTYPES[code]


def _stored_twice(name: str, first: Path, second: Path) -> WeightsError:
    return WeightsError(
        f"{name} is in {first} and in {second.name}, which may have other values; get the files "
        "again"
    )
