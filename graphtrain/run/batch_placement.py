"""Placement of batches: which rows of a batch a process reads, and their copy to its devices."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

import lowering
from graphtrain.data.indexed.dataset import IndexShare
from lowering.machine.target import Target
from lowering.trees import Tree, flatten
from lowering.xla import distributed


def index_share() -> IndexShare:
    """Return the part of each index that this process checks."""
    return IndexShare(distributed.rank(), distributed.count())


class BatchPlacement:
    """Rows of a batch that the devices of this process hold, and their copy to these devices.

    Rows are numbered in the order of the loader: row r of microbatch m is row
    m * (rows of a microbatch) + r. The rows of a process need not be consecutive. If devices of
    several processes hold the same rows, for example under tensor parallelism, each process reads
    them.

    Args:
        described: The arrays of a batch as an executable's inputs() describes them.
        target: The machine.
    """

    def __init__(self, described: Tree, target: Target) -> None:
        self._described = described
        self._backend = lowering.backend(target)
        self.rows: np.ndarray | None = None  # ascending; None: all, in a single process
        if distributed.count() > 1:
            self.rows = _local_rows(described)
            self._positions = _positions(self.rows, described)

    def to_devices(self, batch: Mapping[str, np.ndarray]) -> Tree:
        """Copy the rows of this process, (rows, tokens) or (rows, ...), to its devices."""
        described = flatten(self._described)
        if self.rows is None:
            whole = {name: batch[name].reshape(described[name].shape) for name in described}
            return self._backend.to_devices(whole, self._described)

        def read(name: str, _: tuple[int, ...], index: tuple[slice, ...]) -> np.ndarray:
            rows, rest = index[: self._positions.ndim], index[self._positions.ndim :]
            return batch[name][self._positions[rows]][*(slice(None) for _ in rows), *rest]

        return self._backend.from_shards(self._described, read)


def _local_rows(described: Tree) -> np.ndarray:
    """Return the numbers of the rows that the devices of this process hold, ascending."""
    is_local = np.zeros(_leading_shape(described), bool)
    for array in flatten(described).values():
        for index in array.sharding.addressable_devices_indices_map(array.shape).values():
            is_local[index[: is_local.ndim]] = True
    return np.flatnonzero(is_local)


def _positions(rows: np.ndarray, described: Tree) -> np.ndarray:
    """Return the position of each row of a batch among `rows`, in the shape of the batch."""
    shape = _leading_shape(described)
    positions = np.full(math.prod(shape), len(rows))  # of other rows: outside, to raise an error
    positions[rows] = np.arange(len(rows))
    return positions.reshape(shape)


def _leading_shape(described: Tree) -> tuple[int, ...]:
    """Return the shape of the rows of a batch, which is equal in all of its arrays.

    Those are the dimensions of the tokens before their positions. Images have more behind.
    """
    return tuple(flatten(described)["tokens"].shape[:-1])
