"""Rows of a batch that a process reads, and the samples that contain them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from graphtrain.data.batches.concat_packing import Batch
from graphtrain.errors import DataError


class RowSelection:
    """Some rows of a batch: the samples that contain them, and their positions in these samples."""

    def __init__(self, rows: np.ndarray | None, count: int, rows_per_sample: int) -> None:
        """Select `rows`, ascending, of a batch of `count` rows; None: all."""
        rows = np.arange(count) if rows is None else rows
        self.samples = np.unique(rows // rows_per_sample)
        read = self.samples[:, None] * rows_per_sample + np.arange(rows_per_sample)
        self._positions = np.searchsorted(read.reshape(-1), rows)
        self._is_whole = read.size == len(rows)

    def of(self, batch: Batch) -> Batch:
        """Return the selected rows of a batch that consists of `samples`."""
        if self._is_whole:
            return batch
        return {name: array[self._positions] for name, array in batch.items()}


def samples_per_batch(packings: Sequence[Any], sequences: int) -> int:
    """Return the number of sequences, or of preference pairs, in a batch."""
    rows = {packing.rows_per_index for packing in packings}
    prefixes = ", ".join(packing.dataset.prefix for packing in packings)
    if len(rows) > 1:
        raise DataError(
            f"{prefixes}: a blend cannot mix preference pairs with other data; use datasets of "
            "one kind"
        )
    (rows_per_sample,) = rows
    if sequences % rows_per_sample:
        raise DataError(
            f"{prefixes}: contains preference pairs of two sequences each, which do not fit into "
            f"a batch of {sequences} sequences; make batch.global_batch_size / batch.microbatches "
            "even"
        )
    return sequences // rows_per_sample
