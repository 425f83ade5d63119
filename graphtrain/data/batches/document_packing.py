"""Rows of whole documents: several that fit together, or one and padding.

A document of n tokens takes n - 1 places of a row: none of its targets is in another document. Of a
conversation, targets that are not learned weigh 0. The rows of a dataset are the same in every
epoch; a loader shuffles them.
"""

import warnings
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Literal

import numpy as np

from graphtrain.data.batches.packing import Batch, check_tokens, empty_batch
from graphtrain.data.indexed.dataset import IndexedDataset
from graphtrain.data.indexed.loss_spans import Learned
from graphtrain.errors import DataError

Longer = Literal["refuse", "cut", "drop"]


class WholePacking:
    """Random access to the rows of a dataset; number i is that of row i % len(self).

    Of a dataset of pairs, a number gives two rows: the chosen answer and the rejected one.

    Args:
        dataset: Of documents.
        length: Places of a row.
        learned: What to learn of the documents; None: everything.
        fit: Whether a row takes as many documents as fit; else it takes one.
        longer: What becomes of documents with more than length + 1 tokens.
        pairs: Whether documents 2i and 2i + 1 are a pair.
        vocab: Tokens of the model; without it, tokens are not compared with it.
        apart: Whether batches say which tokens are of one document.

    Raises:
        DataError: documents are longer, and that is refused, or none can be used.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        length: int,
        *,
        learned: Learned | None,
        fit: bool,
        longer: Longer,
        pairs: bool = False,
        vocab: int | None = None,
        apart: bool = False,
    ) -> None:
        self.dataset, self.length = dataset, length
        self.rows = 2 if pairs else 1  # of a number
        self.identity = f"{'fit' if fit and not pairs else 'padded'}, longer: {longer}"
        self._learned, self._vocab, self._apart = learned, vocab, apart
        documents = self._usable(longer, pairs)
        if pairs:
            starts = np.arange(0, len(documents) + 1, 2)
        elif fit:
            sizes = self._places(documents)
            row_of = best_fit(sizes, length)
            documents = documents[np.argsort(row_of, kind="stable")]
            starts = np.concatenate([[0], np.cumsum(np.bincount(row_of))])
        else:
            starts = np.arange(len(documents) + 1)
        self._documents, self._starts = documents, starts

    def __len__(self) -> int:
        """Rows in one epoch; of pairs, pairs."""
        return len(self._starts) - 1

    def documents(self, index: int) -> np.ndarray:
        """The numbers of the documents in a row, in order."""
        row = index % len(self)
        return self._documents[self._starts[row] : self._starts[row + 1]]

    def batch(self, indices: Sequence[int] | np.ndarray) -> Batch:
        """Rows of inputs, targets and weights; index -1 gives padding."""
        batch = empty_batch(len(indices) * self.rows, self.length, self._apart)
        for place, index in enumerate(indices):
            if index < 0:
                continue
            documents = self.documents(int(index))
            each = [documents] if self.rows == 1 else np.split(documents, self.rows)
            for number, row in enumerate(each, place * self.rows):
                self._fill({name: array[number] for name, array in batch.items()}, row)
        return batch

    def _fill(self, row: Batch, documents: np.ndarray) -> None:
        """Write documents into the arrays of a row, one after another."""
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

    def _places(self, documents: np.ndarray) -> np.ndarray:
        """That each document takes in a row."""
        offsets = self.dataset.document_offsets
        return np.minimum(offsets[documents + 1] - offsets[documents] - 1, self.length)

    def _usable(self, longer: Longer, pairs: bool) -> np.ndarray:
        """The numbers of the documents to use, ascending; says how many are cut or left out."""
        sizes = np.diff(self.dataset.document_offsets)
        long = sizes > self.length + 1
        use = sizes > 1
        if longer == "cut" and self._learned:
            use &= self._learned.first() <= self.length  # else nothing is learned of the rest
        elif longer == "drop":
            use &= ~long
        if pairs:
            use = np.repeat(use.reshape(-1, 2).all(axis=1), 2)
        if long.any():
            self._tell(longer, long, use, int(sizes.max()))
        if not use.any():
            raise DataError(f"{self.dataset.prefix}: no document can be used")
        return np.flatnonzero(use)

    def _tell(self, longer: Longer, long: np.ndarray, use: np.ndarray, longest: int) -> None:
        said = (
            f"{self.dataset.prefix}: {long.sum()} of {len(long)} documents are longer than "
            f"batch.length = {self.length} (the longest has {longest} tokens)"
        )
        if longer == "refuse":
            raise DataError(
                f'{said}; set run.data.longer to "cut", which keeps their beginning, or to "drop", '
                "or make batch.length larger"
            )
        warnings.warn(
            f"{said}; {(long & use).sum()} are cut, {(~use).sum()} left out", stacklevel=1
        )


def best_fit(sizes: np.ndarray, length: int) -> np.ndarray:
    """The row of each document: longest first, each where it leaves the least room.

    Rows have the numbers from 0 on; no size is above `length`.

    Source: Ding et al. 2024, "Fewer truncations improve language modeling", algorithm 1,
    https://arxiv.org/abs/2404.10830
    """
    row_of = np.zeros(len(sizes), np.int64)
    rooms: list[int] = []  # that some rows have left, ascending
    rows: dict[int, list[int]] = {}  # by the room they have left
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
