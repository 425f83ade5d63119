"""Gather arrays, of which each process holds a part, on rank 0 by files that all processes see."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from graphtrain.errors import DumpError
from graphtrain.run.agreement import on_all_ranks
from lowering.trees import Tree, flatten, unflatten
from lowering.xla import distributed

_REMEDY = "write the dump to a file system that all hosts share"


def gather(tree: Tree, directory: Path) -> Tree | None:
    """Return the whole arrays of a tree on rank 0, and None on other ranks; all ranks call it.

    Each part of an array comes from one process, however many hold it.

    Args:
        tree: arrays, of which this process holds some parts.
        directory: directory that all processes see; nothing is left in it.

    Raises:
        DumpError: a process cannot write there, or rank 0 does not see what it wrote.
    """
    arrays = flatten(tree)
    if distributed.count() == 1:
        return unflatten({path: np.asarray(array) for path, array in arrays.items()})
    rank = distributed.rank()
    places = on_all_ranks(lambda: _write(arrays, directory, rank))
    places_of_all = distributed.all_gather_text(json.dumps(places))
    whole = on_all_ranks(lambda: _read(arrays, directory, places_of_all) if rank == 0 else None)
    _file(directory, rank).unlink()
    return None if whole is None else unflatten(whole)


def _file(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.parts"


def _write(
    arrays: dict[str, jax.Array], directory: Path, rank: int
) -> list[tuple[str, list[list[int]]]]:
    """Write the parts that are this process's to write; return path and extent of each."""
    if not directory.is_dir():
        raise DumpError(f"{directory} of rank 0 is not on this host; {_REMEDY}")
    places, file = [], _file(directory, rank)
    try:
        with file.open("wb") as stream:
            for path, extent, part in _parts(arrays):
                stream.write(np.ascontiguousarray(part).tobytes())
                places.append((path, extent))
    except OSError as error:
        raise DumpError(f"{file} cannot be written: {error.strerror or error}") from None
    return places


def _parts(arrays: dict[str, jax.Array]) -> Iterator[tuple[str, list[list[int]], np.ndarray]]:
    """Yield path, extent (begin and end in each dimension) and elements of each part."""
    for path, array in arrays.items():
        for shard in array.addressable_shards:
            if shard.replica_id == 0:
                extent = [
                    list(one.indices(size)[:2])
                    for one, size in zip(shard.index, array.shape, strict=True)
                ]
                yield path, extent, np.asarray(shard.data)


def _read(
    arrays: dict[str, jax.Array], directory: Path, places_of_all: list[str]
) -> dict[str, np.ndarray]:
    """Return the whole arrays, of the parts of all processes."""
    whole = {path: np.empty(one.shape, np.dtype(one.dtype)) for path, one in arrays.items()}
    for rank, places in enumerate(places_of_all):
        file = _file(directory, rank)
        try:
            with file.open("rb") as stream:
                for path, extent in json.loads(places):
                    _fill(whole[path], extent, stream)
        except OSError as error:
            raise DumpError(
                f"{file} of rank {rank} cannot be read: {error.strerror or error}; {_REMEDY}"
            ) from None
    return whole


def _fill(array: np.ndarray, extent: list[list[int]], stream: Any) -> None:
    """Read one part of an array from a file."""
    part = array[(*(slice(*ends) for ends in extent), ...)]  # a view also of a scalar
    read = np.frombuffer(stream.read(part.nbytes), array.dtype)
    part[...] = read.reshape(part.shape)
