"""Reading of the shards of arrays ahead of their use, several at once.

A host that reads its pieces from other hosts or an object store waits for each one: one after the
other, the time would be that of all waits.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import numpy as np

from graphtrain.checkpoints.layer_rows import Index
from lowering.trees import Tree, flatten

_AT_ONCE = 4  # shards, which are in host memory together


class ReadAhead:
    """Shards of the arrays of a tree, of which the next ones are read while one is used.

    Args:
        described: Shapes and shardings.
        open_array: Returns what reads parts of an array by its path.
    """

    def __init__(
        self, described: Tree, open_array: Callable[[str], Callable[[Index], np.ndarray]]
    ) -> None:
        self._open_array = open_array
        self._names = list(flatten(described))
        self._waiting = deque(
            (name, index)
            for name, leaf in flatten(described).items()
            for index in _shards(leaf.sharding.addressable_devices_indices_map(leaf.shape).values())
        )
        self._read: dict[tuple[str, str], Future[np.ndarray]] = {}
        self._readers: dict[str, Callable[[Index], np.ndarray]] = {}
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(_AT_ONCE, "restore")

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    def take(self, name: str, index: Index) -> np.ndarray:
        """Return a shard, in memory of its own; arrays are taken in the order of the tree.

        Raises what the reader of the array raises.
        """
        while self._waiting and len(self._read) < _AT_ONCE:
            key, shard = self._key(*self._waiting[0]), self._waiting.popleft()
            self._read[key] = self._pool.submit(self._read_now, *shard)
        future = self._read.pop(self._key(name, index), None)
        # Of a shard that several devices have, each needs its own: JAX may use the memory as it is.
        array = future.result() if future is not None else self._read_now(name, index)
        self._forget_before(name)
        return array

    def _read_now(self, name: str, index: Index) -> np.ndarray:
        with self._lock:
            if name not in self._readers:
                self._readers[name] = self._open_array(name)
            reader = self._readers[name]
        return reader(index)

    def _forget_before(self, name: str) -> None:
        """Close the arrays before this one, with the pieces that they remember."""
        with self._lock:
            while self._names[0] != name:
                self._readers.pop(self._names.pop(0), None)

    @staticmethod
    def _key(name: str, index: Index) -> tuple[str, str]:
        return name, str(index)


def _shards(indices: Iterable[Index]) -> list[Index]:
    """Return each of the indices once, in their order."""
    return list({str(index): index for index in indices}.values())
