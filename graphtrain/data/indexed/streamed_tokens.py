"""Tokens of a dataset whose .bin is elsewhere, read by blocks."""

from typing import Protocol

import numpy as np


class Blocks(Protocol):
    """Blocks of a file, verified; only the last one is shorter than the others."""

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        ...

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        ...

    def prefetch(self, blocks: np.ndarray) -> None:
        """Begin to fetch blocks, without waiting; these may be dropped if there is no room."""
        ...

    def read(self, blocks: np.ndarray) -> list[bytes]:
        """Return blocks, fetched at the same time where they are not on this machine.

        Raises:
            GraphtrainError: a block cannot be read, or is not as it was prepared.
        """
        ...


class StreamedTokens:
    """All tokens of a dataset, read as the memory-mapped array of a local one is.

    Args:
        blocks: Blocks of the .bin.
        dtype: Type of a token.
    """

    def __init__(self, blocks: Blocks, dtype: np.dtype) -> None:
        self._blocks, self.dtype = blocks, dtype
        self._per_block = blocks.block_bytes // dtype.itemsize

    def __len__(self) -> int:
        """Return the number of tokens."""
        return self._blocks.size // self.dtype.itemsize

    def __getitem__(self, positions: slice | np.ndarray) -> np.ndarray:
        """Return the tokens at positions, or of a slice without a step."""
        if isinstance(positions, slice):
            start, stop, _ = positions.indices(len(self))
            positions = np.arange(start, stop)
        owners, offsets = np.divmod(positions, self._per_block)
        blocks, of_block = np.unique(owners, return_inverse=True)
        tokens = np.empty(len(positions), self.dtype)
        for number, block in enumerate(self._blocks.read(blocks)):
            inside = of_block == number
            tokens[inside] = np.frombuffer(block, self.dtype)[offsets[inside]]
        return tokens

    def prefetch(self, starts: np.ndarray, sizes: np.ndarray) -> None:
        """Begin to fetch ranges of tokens, none of them empty."""
        first = starts // self._per_block
        last = (starts + sizes - 1) // self._per_block
        ranges = [np.arange(begin, end + 1) for begin, end in zip(first, last, strict=True)]
        if ranges:
            self._blocks.prefetch(np.unique(np.concatenate(ranges)))
