"""Pieces of arrays: the shards of one host's devices, each in a file of its own.

All shards of an array have the same shape, so a piece is named by its place in the grid of shards:
`pieces/parameters.head/0.1` is the second shard of the first row. A piece holds the elements in the
order of C, as they are in memory, without a header; shape and dtype are in the metadata.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from graphtrain.checkpoints.layer_rows import Index
from graphtrain.errors import TrainingError
from lowering.trees import Tree, flatten

FOLDER = "pieces"
Shape = tuple[int, ...]


def piece_name(path: str, place: Shape) -> str:
    """Return the file of a piece, relative to the directory of its step; no two have the same."""
    return f"{FOLDER}/{_array(path)}/{'.'.join(map(str, place)) or '0'}"


def is_piece_below(name: str, root: str) -> bool:
    """Return whether a file is a piece of an array whose path is below a root of the state."""
    return name.startswith(f"{FOLDER}/{_array(root)}.")


def _array(path: str) -> str:
    return path.replace("%", "%25").replace(".", "%2E").replace("/", ".")


def shard_shapes(state: Tree) -> dict[str, Shape]:
    """Return the shape of the shards of each array by its path."""
    return {
        path: tuple(leaf.sharding.shard_shape(leaf.shape)) for path, leaf in flatten(state).items()
    }


def pieces_on_host(state: Tree) -> dict[str, np.ndarray]:
    """Copy the pieces of this process's devices to host memory, by the name of their file.

    Of equal shards on several devices, one is copied. The arrays may be overwritten afterwards.
    """
    leaves = flatten(state)
    for leaf in leaves.values():
        leaf.copy_to_host_async()
    copies = {}
    for path, leaf in leaves.items():
        shape, memory = tuple(leaf.sharding.shard_shape(leaf.shape)), leaf.sharding.memory_kind
        for shard in leaf.addressable_shards:
            name = piece_name(path, _place(path, shard.index, shape, leaf.shape))
            if name not in copies:
                is_on_host = shard.device.platform == "cpu" or "host" in (memory or "")
                copies[name] = _owned(np.asarray(shard.data), is_on_host)
    return copies


def _owned(array: np.ndarray, is_on_host: bool) -> np.ndarray:
    """Return an array that shares no memory with JAX, as views of arrays in host memory do."""
    return np.array(array, order="C") if is_on_host else np.asarray(array, order="C")


def _place(path: str, index: Index, shape: Shape, whole: Shape) -> Shape:
    starts = [one.indices(size)[0] for one, size in zip(index, whole, strict=True)]  # pyright: ignore
    if any(start % size for start, size in zip(starts, shape, strict=True) if size):
        raise TrainingError(
            f"{path}: its shards are not equally large, so they cannot be saved on disks of the "
            "hosts; unset run.checkpoints.local"
        )
    return tuple(start // size if size else 0 for start, size in zip(starts, shape, strict=True))


def groups_of_ranks(state: Tree, count: int) -> list[int]:
    """Return a number for each rank: ranks with equal numbers hold the same pieces.

    The pieces of one rank of each group are all pieces of the state.
    """
    digests = [hashlib.sha256() for _ in range(count)]
    for path, leaf in flatten(state).items():
        indices: list[set[str]] = [set() for _ in range(count)]
        for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
            indices[device.process_index].add(str(index))
        for digest, held in zip(digests, indices, strict=True):
            digest.update(json.dumps([path, sorted(held)]).encode())
    numbers: dict[bytes, int] = {}
    return [numbers.setdefault(digest.digest(), len(numbers)) for digest in digests]


def pieces_to_upload(state: Tree, rank: int) -> tuple[list[str], list[int]]:
    """Return the pieces of a rank that no lower rank has, and all ranks that have such pieces.

    Together, their pieces are all pieces of the state, each once.
    """
    names: list[str] = []
    ranks: set[int] = set()
    for path, leaf in flatten(state).items():
        shape, lowest = tuple(leaf.sharding.shard_shape(leaf.shape)), dict[Shape, int]()
        for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
            place = _place(path, index, shape, leaf.shape)
            lowest[place] = min(device.process_index, lowest.get(place, device.process_index))
        names += [piece_name(path, place) for place, first in lowest.items() if first == rank]
        ranks.update(lowest.values())
    return sorted(names), sorted(ranks)


def all_pieces(
    arrays: Mapping[str, Sequence[Any]], shapes: Mapping[str, Sequence[int]]
) -> Iterator[str]:
    """Yield the names of all pieces of a state.

    Args:
        arrays: Shape and dtype of each array by its path.
        shapes: Shape of the pieces of each array.
    """
    for path, (whole, _) in arrays.items():
        spans = [(0, size) for size in whole]
        yield from (piece_name(path, place) for place in _places(spans, tuple(shapes[path])))


def assemble(
    path: str,
    index: Index,
    whole: Shape,
    shape: Shape,
    dtype: np.dtype,
    read_piece: Callable[[str], bytes],
) -> np.ndarray:
    """Return a part of an array from the pieces that it overlaps.

    Args:
        path: Path of the array in the state.
        index: The part, as an index into the array; integers drop their axis.
        whole: Shape of the array.
        shape: Shape of its pieces.
        dtype: Its dtype.
        read_piece: Returns the bytes of a piece by its name.
    """
    index = (*index, *(slice(None) for _ in whole[len(index) :]))
    spans = [_span(one, size) for one, size in zip(index, whole, strict=True)]
    result = np.empty([stop - start for start, stop in spans], dtype)
    for place in _places(spans, shape):
        piece = np.frombuffer(read_piece(piece_name(path, place)), dtype).reshape(shape)
        source, target = [], []
        for (start, stop), number, size in zip(spans, place, shape, strict=True):
            first = number * size
            low, high = max(start, first), min(stop, first + size)
            source.append(slice(low - first, high - first))
            target.append(slice(low - start, high - start))
        result[tuple(target)] = piece[tuple(source)]
    dropped = tuple(axis for axis, one in enumerate(index) if not isinstance(one, slice))
    return result.squeeze(dropped)


def _span(index: slice | int, size: int) -> tuple[int, int]:
    if not isinstance(index, slice):
        return index, index + 1
    start, stop, step = index.indices(size)
    if step != 1:
        raise ValueError(f"a part with a step of {step}")
    return start, max(start, stop)


def _places(spans: list[tuple[int, int]], shape: Shape) -> Iterator[Shape]:
    """Yield the places of the pieces that a part overlaps."""
    ranges = [
        range(start // size, -(-stop // size)) if size and stop > start else range(0)
        for (start, stop), size in zip(spans, shape, strict=True)
    ]
    yield from itertools.product(*ranges)


def write_pieces(directory: Path, pieces: dict[str, np.ndarray]) -> None:
    """Write the pieces of a host below the directory of a step.

    Raises:
        OSError: a file cannot be written.
    """
    for name, array in pieces.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.write(array.reshape(-1).view(np.uint8).data)
