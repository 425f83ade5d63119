"""Validation batches over one pass of a dataset."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from graphtrain.data.batches.concat_packing import Batch
from graphtrain.data.batches.document_packing import Overlong
from graphtrain.data.batches.row_images import RowImages
from graphtrain.data.batches.row_selection import RowSelection, samples_per_batch
from graphtrain.data.batches.rows import (
    BATCHES_AHEAD,
    NO_STREAMS,
    Packing,
    PackingSettings,
    Streams,
)
from graphtrain.data.batches.sources import NO_SOURCES, Sources
from graphtrain.data.indexed.dataset import WHOLE_INDEX, IndexShare


def evaluation_batches(
    prefix: str | Path,
    *,
    batch_size: int,
    seq_len: int,
    vocab: int | None = None,
    isolate_documents: bool = False,
    packing: Packing | None = None,
    overlong: Overlong = "error",
    pairs: bool | None = None,
    rows: np.ndarray | None = None,
    limit: int | None = None,
    index_share: IndexShare = WHOLE_INDEX,
    sources: Sources = NO_SOURCES,
    streams: Streams = NO_STREAMS,
    images: RowImages | None = None,
) -> Iterator[Batch]:
    """Return the batches of one pass over a dataset, unshuffled. The dataset is opened at once.

    In text, every token but the first is a target once. In conversations, only tokens in the loss
    mask are targets, and rows come in packing order. All batches have the same shape: the last
    sequence and the last batch are padded with weight 0. With `isolate_documents`, the
    first token of each document is not a target.

    The arguments are those of `Loader`, and `limit`, the maximum number of sequences.

    Raises:
        DataError: the dataset cannot be used, or a token id is outside the vocabulary.
    """
    settings = PackingSettings(
        length=seq_len,
        vocab=vocab,
        isolate_documents=isolate_documents,
        packing=packing,
        overlong=overlong,
        index_share=index_share,
        preference_pairs=pairs,
        sources=sources,
        streams=streams,
        images=images,
    )
    packed = settings.open(prefix)
    batch_samples = samples_per_batch([packed], batch_size)
    selection = RowSelection(rows, batch_size, packed.rows_per_index)

    count = len(packed) if limit is None else min(len(packed), limit // packed.rows_per_index)

    def samples_from(first: int) -> np.ndarray:
        samples = first + selection.samples
        return np.where(samples < count, samples, -1)

    def batches() -> Iterator[Batch]:
        for first in range(0, count, batch_samples):
            ahead = range(0 if first == 0 else BATCHES_AHEAD, BATCHES_AHEAD + 1)
            for number in ahead if streams else ():
                packed.prefetch(samples_from(first + number * batch_samples))
            yield selection.of(packed.batch(samples_from(first)))

    return batches()
