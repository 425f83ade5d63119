"""Folders of weights by name: safetensors, one file or several with an index, and PyTorch's .bin.

One array is read at a time, by plain reads: pages of a mapped file would count as memory.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from graphtrain.errors import WeightsError

DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
_TORCH = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_MOST_HEADER = 100 << 20  # bytes; what the safetensors library takes


class Folder(Protocol):
    """Arrays by name."""

    @property
    def names(self) -> tuple[str, ...]: ...

    def dtype(self, name: str) -> np.dtype:
        """Raises:
        WeightsError: it is one that cannot be converted.
        """
        ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str) -> np.ndarray:
        """The whole array, in memory of its own."""
        ...


@dataclass(frozen=True)
class _Entry:
    path: Path
    code: str  # of the dtype
    shape: tuple[int, ...]
    offset: int


class SafetensorsFolder:
    """Raises:
    WeightsError: a file is damaged, or one that the index names is not there.
    """

    def __init__(self, paths: list[Path]) -> None:
        self._entries: dict[str, _Entry] = {}
        for path in paths:
            self._entries |= _entries(path)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def dtype(self, name: str) -> np.dtype:
        return _known(name, self._entries[name].code)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def read(self, name: str) -> np.ndarray:
        entry = self._entries[name]
        count = math.prod(entry.shape)
        array = np.fromfile(entry.path, self.dtype(name), count, offset=entry.offset)
        return array.reshape(entry.shape)

    def part(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """A part of an array; only that is read."""
        entry = self._entries[name]
        mapped = np.memmap(entry.path, self.dtype(name), "r", entry.offset, entry.shape)
        return np.array(mapped[index])


def _entries(path: Path) -> dict[str, _Entry]:
    """Where each array of a file begins; the library has checked that none overlap."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np"):
            pass
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(length, _MOST_HEADER)))
    except (OSError, SafetensorError, ValueError) as error:
        raise WeightsError(f"{path} is no whole safetensors file: {error}") from error
    header.pop("__metadata__", None)
    return {
        name: _Entry(
            path,
            about["dtype"],
            tuple(about["shape"]),
            8 + length + about["data_offsets"][0],
        )
        for name, about in header.items()
    }


class BinFolder:
    """PyTorch's own files, loaded as weights only: nothing in them runs.

    Raises:
        WeightsError: PyTorch is not installed, or will not load a file so.
    """

    def __init__(self, paths: list[Path]) -> None:
        self._where: dict[str, Path] = {}
        self._about: dict[str, tuple[str, tuple[int, ...]]] = {}
        for path in paths:
            for name, tensor in _load_bin(path).items():
                self._where[name] = path
                kind = str(tensor.dtype).removeprefix("torch.")
                self._about[name] = _TORCH.get(kind, kind), tuple(tensor.shape)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._where)

    def dtype(self, name: str) -> np.dtype:
        return _known(name, self._about[name][0])

    def shape(self, name: str) -> tuple[int, ...]:
        return self._about[name][1]

    def read(self, name: str) -> np.ndarray:
        # The file is mapped again for each array: mapped pages stay in memory until it is closed.
        tensor = _load_bin(self._where[name])[name]
        return as_numpy(tensor, self.dtype(name)).copy()


def as_numpy(tensor: Any, dtype: np.dtype) -> np.ndarray:
    """A tensor of PyTorch; its memory, where that is in one piece."""
    import torch

    tensor = tensor.detach().contiguous()
    whole = tensor.view(torch.int16) if tensor.element_size() == 2 else tensor
    return whole.numpy().view(dtype)


def torch_dtype(name: str, kind: str) -> np.dtype:
    """Of an array by PyTorch's name for it.

    Raises:
        WeightsError: it is one that cannot be converted.
    """
    return _known(name, _TORCH.get(kind, kind))


def _load_bin(path: Path) -> Mapping[str, Any]:
    try:
        import torch
    except ImportError:
        raise WeightsError(
            f"{path}: .bin files are PyTorch's; install it: pip install 'graphtrain[bin]'"
        ) from None
    import pickle

    try:
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # a file from before PyTorch 1.6 cannot be mapped
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0]
        raise WeightsError(f"{path} cannot be loaded as weights only: {reason}") from error
    if not isinstance(loaded, Mapping):
        raise WeightsError(f"{path} holds a {type(loaded).__name__}, not tensors by name")
    return {name: one for name, one in loaded.items() if isinstance(one, torch.Tensor)}


def _known(name: str, code: str) -> np.dtype:
    if code not in DTYPES:
        raise WeightsError(f"{name} is of dtype {code}; {', '.join(_TORCH)} can be converted")
    return DTYPES[code]


def open_folder(directory: Path, stem: str = "model", bin_stem: str = "pytorch_model") -> Folder:
    """The weights in a folder: safetensors if there are any, else .bin.

    Raises:
        WeightsError: there are none, or not all that an index names.
    """
    kinds = ((".safetensors", stem, SafetensorsFolder), (".bin", bin_stem, BinFolder))
    for suffix, name, kind in kinds:
        index = directory / f"{name}{suffix}.index.json"
        if index.is_file():
            return kind(_listed(index))
        if (single := directory / f"{name}{suffix}").is_file():
            return kind([single])
    raise WeightsError(
        f"{directory} has no weights: neither {stem}.safetensors nor {bin_stem}.bin, nor an index "
        "of several"
    )


def _listed(index: Path) -> list[Path]:
    try:
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise WeightsError(f"{index} is no index of weights: {error}") from error
    for name in files:
        if Path(name).name != name:
            raise WeightsError(f"{index} names {name}, which is outside of its folder")
        if not (index.parent / name).is_file():
            raise WeightsError(f"{index} names {name}, which is not there")
    return [index.parent / name for name in files]
