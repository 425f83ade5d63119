"""Blocks of a .bin in an object store: fetched ahead, verified, cached."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

import numpy as np

from graphtrain.cache.remote import ObjectStore
from graphtrain.cache.store_errors import TransientStoreError, UnusableObject
from graphtrain.data.indexed.blocks import block_digest
from graphtrain.errors import CacheError, DataError
from graphtrain.run.streaming.background import background
from graphtrain.run.streaming.block_files import BlockFiles

_PAUSE_SECONDS = 0.5  # after the store has failed for as long as its client repeats requests


class StreamedBlocks:
    """Blocks of one object; `graphtrain.data.indexed.streamed_tokens.Blocks` says of what kind.

    Args:
        store: Store of the object.
        name: Name of the object.
        size: Its size in bytes.
        block_bytes: Bytes of a block.
        digests: Digest of each block.
        files: Cache of blocks.
        most_ahead: Blocks that may be on their way because of `prefetch`.
        timeout: Seconds for which a block is asked for again.
        changed: Says what is wrong with the dataset if its description in the store is another now.
    """

    def __init__(
        self,
        store: ObjectStore,
        name: str,
        *,
        size: int,
        block_bytes: int,
        digests: list[bytes],
        files: BlockFiles,
        most_ahead: int,
        timeout: float,
        changed: Callable[[], str | None],
    ) -> None:
        self._store, self._name, self.size, self.block_bytes = store, name, size, block_bytes
        self._digests, self._files, self._most_ahead = digests, files, most_ahead
        self._timeout, self._changed = timeout, changed
        self._pending: dict[int, Future[bytes]] = {}
        self._lock = threading.Lock()

    def prefetch(self, blocks: np.ndarray) -> None:
        """Begin to fetch blocks, without waiting; not beyond `most_ahead`."""
        for block in map(int, blocks):
            if len(self._pending) >= self._most_ahead:
                return
            if not self._files.has(block):
                self._begin(block)

    def read(self, blocks: np.ndarray) -> list[bytes]:
        """Return blocks, fetched at the same time where they are not on this machine.

        Raises:
            DataError: a block is not as it was prepared.
            CacheError: the store cannot be read.
        """
        found = [self._files.read(int(block)) for block in blocks]
        futures = {
            int(block): self._begin(int(block))
            for block, data in zip(blocks, found, strict=True)
            if data is None
        }
        return [
            futures[int(block)].result() if data is None else data
            for block, data in zip(blocks, found, strict=True)
        ]

    def _begin(self, block: int) -> Future[bytes]:
        with self._lock:
            if (future := self._pending.get(block)) is None:
                future = background().submit(partial(self._fetch_and_keep, block))
                self._pending[block] = future
        return future

    def _fetch_and_keep(self, block: int) -> bytes:
        try:
            data = self._fetch(block)
            self._files.keep(block, data)
            return data
        finally:
            with self._lock:
                self._pending.pop(block, None)  # another read asks again if this one failed

    def _fetch(self, block: int) -> bytes:
        """Return a block from the store; one that is not as it was prepared is asked for twice."""
        data = self._get(block)
        if block_digest(data) != self._digests[block]:  # perhaps only on its way
            data = self._get(block)
        if block_digest(data) != self._digests[block]:
            start = block * self.block_bytes
            raise DataError(
                self._changed()
                or f"{self._label}: the block at byte {start} differs from its digest in the "
                "description of the dataset; upload the file again"
            )
        return data

    def _get(self, block: int) -> bytes:
        start = block * self.block_bytes
        length = min(self.block_bytes, self.size - start)
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                return self._store.read_range(self._name, start, length, self.size)
            except UnusableObject as error:  # missing, or of another size
                raise DataError(self._changed() or f"{error}; upload the file again") from error
            except TransientStoreError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_PAUSE_SECONDS)
            except CacheError as error:
                raise DataError(str(error)) from error

    @property
    def _label(self) -> str:
        return f"{self._store.url.rstrip('/')}/{self._name}"
