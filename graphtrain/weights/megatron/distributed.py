"""torch-dist checkpoints: arrays in chunks, located by the file `.metadata`."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from graphtrain.errors import WeightsError
from graphtrain.weights.files import numpy_dtype_of
from graphtrain.weights.megatron.names import canonical_name
from graphtrain.weights.megatron.pickles import Placeholder, load_pickle, load_tensor
from graphtrain.weights.torch_arrays import as_numpy

# Leading axes of layers and experts: positions in a name where their index is inserted.
_STACKED_AXES = (
    re.compile(r"(?<=decoder\.layers)\.(?!\d)"),
    re.compile(r"(?<=\.experts)\.experts\.(?!\d)"),
)


@dataclass(frozen=True)
class _Chunk:
    path: Path
    begin: int  # bytes from the beginning of the file
    length: int  # bytes
    offset: tuple[int, ...]  # position in the array
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Array:
    key: str  # name in the checkpoint
    at: tuple[int, ...]  # index along the axes of layers and experts
    shape: tuple[int, ...]  # without the axes of layers and experts
    dtype: str


class TorchDist:
    """Weights of a torch-dist checkpoint, by canonical names.

    Raises:
        WeightsError: a file is damaged, or uses an unsupported feature.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / ".metadata"
        metadata = load_pickle(self._path)
        try:
            self._arrays, self._chunks = _index(directory, metadata)
        except (AttributeError, TypeError, ValueError, LookupError) as error:
            raise WeightsError(
                f"{self._path} does not list arrays and their chunks: {error!r}"
            ) from error

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._arrays)

    def dtype(self, name: str) -> np.dtype:
        return numpy_dtype_of(name, self._arrays[name].dtype)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._arrays[name].shape

    def read(self, name: str) -> np.ndarray:
        array = self._arrays[name]
        chunks = [chunk for chunk in self._chunks[array.key] if _contains(chunk, array.at)]
        result, covered = np.empty(array.shape, self.dtype(name)), 0
        for chunk in chunks:
            chunk_values = self._read(chunk, array, self.dtype(name))
            if chunk_values.shape == array.shape:
                return chunk_values
            begins = chunk.offset[len(array.at) :]
            destination = [
                slice(begin, begin + size)
                for begin, size in zip(begins, chunk_values.shape, strict=True)
            ]
            result[tuple(destination)] = chunk_values
            covered += chunk_values.size
        if covered != result.size:
            raise WeightsError(
                f"{self._path}: the chunks of {array.key} do not cover it exactly once"
            )
        return result

    def _read(self, chunk: _Chunk, array: _Array, dtype: np.dtype) -> np.ndarray:
        if not chunk.path.is_file():
            raise WeightsError(f"{chunk.path}, which contains {array.key}, does not exist")
        tensor = load_tensor(chunk.path, chunk.begin, chunk.length)
        if tuple(getattr(tensor, "shape", ())) != chunk.shape:
            raise WeightsError(
                f"{chunk.path} does not contain {array.key} at the position in {self._path}"
            )
        inside = [at - begin for at, begin in zip(array.at, chunk.offset, strict=False)]
        return as_numpy(tensor[tuple(inside)], dtype)


def _index(directory: Path, metadata: Any) -> tuple[dict[str, _Array], dict[str, list[_Chunk]]]:
    arrays: dict[str, _Array] = {}
    shapes: dict[tuple[str, tuple[int, ...]], tuple[int, ...]] = {}
    for key, entry in metadata.state_dict_metadata.items():
        name = canonical_name(key)
        if key.startswith(("optimizer.", "chained_")) or name is None or not hasattr(entry, "size"):
            continue
        arrays |= _arrays(key, name, tuple(entry.size), _dtype(entry.properties).__name__)
        for chunk in entry.chunks:
            shapes[key, tuple(chunk.offsets)] = tuple(chunk.sizes)
    chunks: dict[str, list[_Chunk]] = defaultdict(list)
    for index, location in metadata.storage_data.items():
        if (shape := shapes.get((index.fqn, tuple(getattr(index, "offset", None) or ())))) is None:
            continue
        if getattr(location, "transform_descriptors", None):
            raise WeightsError(f"{directory} is compressed, which is not supported")
        chunks[index.fqn].append(
            _Chunk(
                directory / Path(location.relative_path).name,
                location.offset,
                location.length,
                tuple(index.offset),
                shape,
            )
        )
    return arrays, chunks


def _dtype(properties: Placeholder) -> Any:
    """Return the dtype; TensorProperties is pickled as a tuple that begins with it."""
    state = properties.state
    return state[0] if isinstance(state, tuple) else state["dtype"]


def _arrays(key: str, name: str, size: tuple[int, ...], dtype: str) -> dict[str, _Array]:
    """Return the arrays of a key by name: one per layer and expert if it stacks them."""
    patterns = [pattern for pattern in _STACKED_AXES if pattern.search(name)]
    arrays = {}
    for at in np.ndindex(*size[: len(patterns)]):
        array_name = name
        for pattern, index in zip(patterns, at, strict=True):
            array_name = pattern.sub(f".{index}.", array_name)
        arrays[array_name] = _Array(key, at, size[len(patterns) :], dtype)
    return arrays


def _contains(chunk: _Chunk, at: tuple[int, ...]) -> bool:
    return all(
        begin <= position < begin + size
        for position, begin, size in zip(at, chunk.offset, chunk.shape, strict=False)
    )
