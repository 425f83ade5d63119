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
from graphtrain.data.indexed.dataset import IndexedDataset
from graphtrain.data.indexed.loss_spans import LossSpans
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

    Raises:
        DataError: documents are longer and `overlong` is "error", or no document can be used.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        length: int,
        *,
        loss_spans: LossSpans | None,
        fit: bool,
        overlong: Overlong,
        pairs: bool = False,
        vocab: int | None = None,
        isolate_documents: bool = False,
    ) -> None:
        self.dataset, self.length = dataset, length
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

    def batch(self, indices: Sequence[int] | np.ndarray) -> Batch:
        """Return the batch of these indices; index -1 gives padding."""
        batch = empty_batch(len(indices) * self.rows_per_index, self.length, self._apart)
        for place, index in enumerate(indices):
            if index < 0:
                continue
            documents = self.documents(int(index))
            each = (
                [documents]
                if self.rows_per_index == 1
                else np.split(documents, self.rows_per_index)
            )
            for number, row in enumerate(each, place * self.rows_per_index):
                self._fill({name: array[number] for name, array in batch.items()}, row)
        return batch

    def _fill(self, row: Batch, documents: np.ndarray) -> None:
        """Write documents into the arrays of one row, one after another."""
        begin = 0
        for number, document in enumerate(documents, 1):
            tokens = self.dataset.document(document)[: self.length + 1]
            check_tokens(self.dataset.prefix, tokens, self._vocab, lambda _, one=document: one)
            end = begin + len(tokens) - 1
            row["tokens"][begin:end] = tokens[:-1]
            row["targets"][begin:end] = tokens[1:]
            learned = self._learned.mask(document, len(tokens))[1:] if self._learned else 1
            row["weights"][begin:end] = learned
            if self._apart:
                row["documents"][begin:end] = number
            begin = end

    def _positions_used(self, documents: np.ndarray) -> np.ndarray:
        """Return the number of positions that each document occupies in a row."""
        offsets = self.dataset.document_offsets
        return np.minimum(offsets[documents + 1] - offsets[documents] - 1, self.length)

    def _usable_documents(self, overlong: Overlong, pairs: bool) -> np.ndarray:
        """Return the indices of usable documents, ascending; warn if some are cut or dropped."""
        sizes = np.diff(self.dataset.document_offsets)
        long = sizes > self.length + 1
        use = sizes > 1
        if overlong == "truncate" and self._learned:
            use &= self._learned.first() <= self.length  # otherwise no target remains after the cut
        elif overlong == "drop":
            use &= ~long
        if pairs:
            use = np.repeat(use.reshape(-1, 2).all(axis=1), 2)
        if long.any():
            self._report_overlong(overlong, long, use, int(sizes.max()))
        if not use.any():
            raise DataError(
                f"{self.dataset.prefix}: no document can be used; increase batch.seq_len, or add "
                "documents of at least 2 tokens"
            )
        return np.flatnonzero(use)

    def _report_overlong(
        self, overlong: Overlong, long: np.ndarray, use: np.ndarray, longest: int
    ) -> None:
        said = (
            f"{self.dataset.prefix}: {long.sum()} of {len(long)} documents are longer than "
            f"batch.seq_len = {self.length} (the longest has {longest} tokens)"
        )
        if overlong == "error":
            raise DataError(
                f'{said}; set run.data.overlong to "truncate" to keep their beginning or to '
                '"drop" to '
                "leave them out, or increase batch.seq_len"
            )
        warnings.warn(
            f"{said}; {(long & use).sum()} are cut, {(~use).sum()} are left out", stacklevel=1
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
    row_of = np.zeros(len(sizes), np.int64)
    rooms: list[int] = []  # distinct free positions of started rows, ascending
    rows: dict[int, list[int]] = {}  # started rows by their free positions
    count = 0
    for document in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[document])
        at = bisect_left(rooms, size)
        if at == len(rooms):
            room, row, count = length, count, count + 1
        else:
            room = rooms[at]
            row = rows[room].pop()
            if not rows[room]:
                del rows[room], rooms[at]
        row_of[document] = row
        if (left := room - size) > 0:
            if left not in rows:
                rows[left] = []
                insort(rooms, left)
            rows[left].append(row)
    return row_of
