"""Token ids of a dataset: the largest, and which occur; of all of it, or of a sample."""

from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np

from graphtrain.data.indexed.dataset import IndexedDataset, dataset_paths, read_header

_BLOCK = 1 << 16  # tokens
_BLOCKS = 64  # of a sample, spread evenly over the dataset


def largest_token(prefix: str | Path) -> int:
    """Return the largest token id of a dataset; reads all of it."""
    return int(IndexedDataset(prefix).tokens.max())


def count_tokens(prefix: str | Path) -> int:
    """Return the number of tokens of a dataset by the size of its .bin.

    Raises:
        DataError: the .idx is not an index.
    """
    tokens, index = dataset_paths(prefix)
    return tokens.stat().st_size // read_header(index)[0].itemsize


def largest_token_of_sample(prefix: str | Path) -> int:
    """Return the largest token id of evenly spread blocks of a dataset that is not empty."""
    return max(int(block.max()) for block in _sample(prefix))


def tokens_in_sample(prefix: str | Path, tokens: Collection[int]) -> set[int]:
    """Return which of these ids occur in evenly spread blocks of a dataset that is not empty."""
    wanted = np.array(sorted(tokens), np.int64)
    return {int(one) for block in _sample(prefix) for one in wanted[np.isin(wanted, block)]}


def _sample(prefix: str | Path) -> Iterator[np.ndarray]:
    path, index = dataset_paths(prefix)
    tokens = np.memmap(path, read_header(index)[0], mode="r")
    for start in sorted({number * len(tokens) // _BLOCKS for number in range(_BLOCKS)}):
        yield tokens[start : start + _BLOCK]
