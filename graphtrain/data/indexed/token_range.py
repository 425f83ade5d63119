"""Largest token id of a dataset: of all of it, or of a sample of a large one."""

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
    path, index = dataset_paths(prefix)
    tokens = np.memmap(path, read_header(index)[0], mode="r")
    starts = {number * len(tokens) // _BLOCKS for number in range(_BLOCKS)}
    return max(int(tokens[start : start + _BLOCK].max()) for start in starts)
