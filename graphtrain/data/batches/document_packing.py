"""Packing of uncut documents: best-fit packing, or one document per row with padding.

A document of n tokens occupies n - 1 positions of a row, so none of its targets is in another
document. Targets of a conversation outside its loss mask have weight 0. The rows of a dataset are
the same in every epoch; the loader shuffles them.
"""

import warnings
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Literal

import numpy as np

from graphtrain.data.batches.concat_packing import Batch, check_tokens, empty_batch
from graphtrain.data.batches.sources import SourceDataset, SourceMasks
from graphtrain.data.indexed.dataset import IndexedDataset
from graphtrain.data.indexed.loss_spans import LossSpans
from graphtrain.data.indexed.streamed_tokens import StreamedTokens
from graphtrain.errors import DataError

Overlong = Literal["error", "truncate", "drop"]


class DocumentPacking:
    """Random access to the rows of a dataset; index i is row i % len(self).

    In a dataset of preference pairs, an index gives two rows: the chosen and the rejected answer.

    Args:
        dataset: The documents.
        length: Sequence length in tokens.
        loss_spans: Loss mask of the documents. None: train on everything.
        fit: Best-fit packing: several documents share a row. False: one document per row.
        overlong: What to do with documents of more than length + 1 tokens.
        pairs: Documents 2i and 2i + 1 are a preference pair.
        vocab: Vocabulary size of the model. None: token ids are not checked against it.
        isolate_documents: Isolate documents: batches contain segment ids.
        length_name: Name of `length` in messages.

    Raises:
        DataError: documents are longer and `overlong` is "error", or no document can be used.
    """

    def __init__(
        self,
        dataset: IndexedDataset | SourceDataset,
        length: int,
        *,
        loss_spans: LossSpans | SourceMasks | None,
        fit: bool,
        overlong: Overlong,
        pairs: bool = False,
        vocab: int | None = None,
        isolate_documents: bool = False,
        length_name: str = "batch.seq_len",
    ) -> None:
        self.dataset, self.length, self._length_name = dataset, length, length_name
        self.rows_per_index = 2 if pairs else 1  # batch rows per index
        self.identity = f"{'best_fit' if fit and not pairs else 'pad'}, overlong: {overlong}"
        self._learned, self._vocab, self._apart = loss_spans, vocab, isolate_documents
        documents = self._usable_documents(overlong, pairs)
        if pairs:
            starts = np.arange(0, len(documents) + 1, 2)
        elif fit:
            sizes = self._positions_used(documents)
            row_of = best_fit(sizes, length)
            documents = documents[np.argsort(row_of, kind="stable")]
            starts = np.concatenate([[0], np.cumsum(np.bincount(row_of))])
        else:
            starts = np.arange(len(documents) + 1)
        self._documents, self._starts = documents, starts

    def __len__(self) -> int:
        """Return the number of rows in one epoch; of preference pairs, the number of pairs."""
        return len(self._starts) - 1

    def documents(self, index: int) -> np.ndarray:
        """Return the indices of the documents in a row, in order."""
        row = index % len(self)
        return self._documents[self._starts[row] : self._starts[row + 1]]

    def prefetch(self, indices: np.ndarray) -> None:
        """Begin to fetch the tokens of these indices, if the dataset is streamed."""
        if isinstance(tokens := self.dataset.tokens, StreamedTokens):
            used = [self.documents(int(index)) for index in indices if index >= 0]
            documents = np.concatenate(used) if used else np.array([], np.int64)
            starts = self.dataset.document_offsets[documents]
            sizes = self.dataset.document_offsets[documents + 1] - starts
            tokens.prefetch(starts, np.minimum(sizes, self.length + 1))

    def batch(self, indices: Sequence[int] | np.ndarray) -> Batch:
        """Return the batch of these indices; index -1 gives padding."""
        batch = empty_batch(len(indices) * self.rows_per_index, self.length, self._apart)
        for batch_index, index in enumerate(indices):
            if index < 0:
                continue
            documents = self.documents(int(index))
            documents_by_row = (
                [documents]
                if self.rows_per_index == 1
                else np.split(documents, self.rows_per_index)
            )
            for row_index, row_documents in enumerate(
                documents_by_row, batch_index * self.rows_per_index
            ):
                self._fill({name: array[row_index] for name, array in batch.items()}, row_documents)
        return batch

    def _fill(self, row: Batch, documents: np.ndarray) -> None:
        """Write documents into the arrays of one row, one after another."""
        start = 0
        for segment_id, document in enumerate(documents, 1):
            tokens = self.dataset.document(document)[: self.length + 1]
            check_tokens(
                self.dataset.prefix, tokens, self._vocab, lambda _, current=document: current
            )
            end = start + len(tokens) - 1
            row["tokens"][start:end] = tokens[:-1]
            row["targets"][start:end] = tokens[1:]
            learned = self._learned.mask(document, len(tokens))[1:] if self._learned else 1
            row["weights"][start:end] = learned
            if self._apart:
                row["documents"][start:end] = segment_id
            start = end

    def _positions_used(self, documents: np.ndarray) -> np.ndarray:
        """Return the number of positions that each document occupies in a row."""
        offsets = self.dataset.document_offsets
        return np.minimum(offsets[documents + 1] - offsets[documents] - 1, self.length)

    def _usable_documents(self, overlong: Overlong, pairs: bool) -> np.ndarray:
        """Return the indices of usable documents, ascending; warn if some are cut or dropped."""
        sizes = np.diff(self.dataset.document_offsets)
        is_overlong = sizes > self.length + 1
        is_usable = sizes > 1
        if overlong == "truncate" and self._learned:
            # Otherwise no target remains after the cut. Masks of shorter documents are not read.
            may_be_cut = np.flatnonzero(sizes > self.length)
            is_usable[may_be_cut] &= self._learned.first(may_be_cut) <= self.length
        elif overlong == "drop":
            is_usable &= ~is_overlong
        if pairs:
            is_usable = np.repeat(is_usable.reshape(-1, 2).all(axis=1), 2)
        if is_overlong.any():
            self._report_overlong(overlong, is_overlong, is_usable, int(sizes.max()))
        if not is_usable.any():
            raise DataError(
                f"{self.dataset.prefix}: no document can be used; increase {self._length_name}, or "
                "add documents of at least 2 tokens"
            )
        return np.flatnonzero(is_usable)

    def _report_overlong(
        self, overlong: Overlong, is_overlong: np.ndarray, is_usable: np.ndarray, longest: int
    ) -> None:
        message = (
            f"{self.dataset.prefix}: {is_overlong.sum()} of {len(is_overlong)} documents are "
            f"longer than {self._length_name} = {self.length} (the longest has {longest} tokens)"
        )
        if overlong == "error":
            raise DataError(
                f'{message}; set run.data.overlong to "truncate" to keep their beginning or to '
                f'"drop" to leave them out, or increase {self._length_name}'
            )
        warnings.warn(
            f"{message}; {(is_overlong & is_usable).sum()} are cut, "
            f"{(~is_usable).sum()} are left out",
            stacklevel=1,
        )


def best_fit(sizes: np.ndarray, length: int) -> np.ndarray:
    """Assign documents to rows by best-fit decreasing bin packing; return the row of each.

    Documents are placed longest first, each into the row where it leaves the least space. Rows are
    numbered from 0.

    Args:
        sizes: Positions that each document occupies, none above `length`.
        length: Positions of a row.

    Source: Ding et al. 2024, "Fewer truncations improve language modeling", algorithm 1,
    https://arxiv.org/abs/2404.10830
    """
    order = np.argsort(-sizes, kind="stable")
    rows_in_order = np.zeros(len(sizes), np.int64)
    started = _StartedRows(length)
    distinct_sizes, counts = np.unique(sizes, return_counts=True)
    first = 0
    for size, count in zip(distinct_sizes[::-1].tolist(), counts[::-1].tolist(), strict=True):
        last = first + count
        while first < last:
            rows = started.place(size, last - first)
            rows_in_order[first : first + len(rows)] = rows
            first += len(rows)
    row_of = np.zeros(len(sizes), np.int64)
    row_of[order] = rows_in_order
    return row_of


class _StartedRows:
    """Rows of best-fit packing by their free positions; the last row added is taken first."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._free_sizes: list[int] = []  # distinct free positions, ascending
        self._rows: dict[int, list[int]] = {}
        self._count = 0

    def place(self, size: int, count: int) -> np.ndarray:
        """Place up to `count` documents of one size into rows with equally many free positions.

        A row takes as many of them as fit, because after each it is still the row in which the
        next one leaves the least space.

        Returns:
            The row of each placed document; at least one is placed.
        """
        index = bisect_left(self._free_sizes, size)
        is_new = index == len(self._free_sizes)
        free = self._length if is_new else self._free_sizes[index]
        per_row = free // size
        needed = -(-count // per_row)
        rows = self._start(needed) if is_new else self._take(index, needed)
        placed = min(count, per_row * len(rows))
        in_last_row = placed - per_row * (len(rows) - 1)
        self._add(free - per_row * size, rows[:-1])
        self._add(free - in_last_row * size, rows[-1:])
        return np.repeat(rows, per_row)[:placed]

    def _start(self, count: int) -> list[int]:
        """Return the numbers of new rows."""
        rows = list(range(self._count, self._count + count))
        self._count += count
        return rows

    def _take(self, index: int, count: int) -> list[int]:
        """Remove up to `count` rows with the free positions at an index, and return them."""
        free = self._free_sizes[index]
        stored = self._rows[free]
        taken = stored[-count:][::-1]
        del stored[-count:]
        if not stored:
            del self._rows[free], self._free_sizes[index]
        return taken

    def _add(self, free: int, rows: list[int]) -> None:
        if not free or not rows:
            return
        if free not in self._rows:
            self._rows[free] = []
            insort(self._free_sizes, free)
        self._rows[free].extend(rows)
