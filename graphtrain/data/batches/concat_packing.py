"""Packing by concatenation: documents end to end, cut into sequences of one length.

Documents are concatenated in an order that is shuffled for each epoch. A sequence has `length`
inputs and `length` targets, shifted by one token, so neighbouring sequences share one token and
every token but the first of an epoch is a target once. The last sequence of an epoch is padded,
with weight 0. A document longer than a sequence continues in the next sequence of its epoch.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from graphtrain.data.indexed.dataset import IndexedDataset
from graphtrain.data.shuffle import permutation
from graphtrain.errors import DataError

# tokens (inputs) and targets int32, weights (loss mask) float32 and, if documents are isolated,
# documents (segment ids) int32: each (sequences, length).
Batch = dict[str, np.ndarray]


@dataclass(frozen=True)
class _Epoch:
    """Order of one epoch: documents[i] is at index i and ends before token position ends[i]."""

    documents: np.ndarray
    ends: np.ndarray


@dataclass(frozen=True)
class _DocumentSlices:
    """Parts of documents that make up one sequence, in order; none is empty."""

    documents: np.ndarray
    starts: np.ndarray  # positions in the dataset's tokens
    sizes: np.ndarray


class ConcatPacking:
    """Random access to the sequences of a dataset; index i is row i % len(self) of its epoch.

    Args:
        dataset: The documents.
        length: Sequence length in tokens.
        seed: Seed of the order of the documents. None: their order on disk, for validation.
        vocab: Vocabulary size of the model. None: token ids are not checked against it.
        isolate_documents: Isolate documents: batches contain segment ids, from 1 in each row with
        0 for
            padding, and the first token of a document is not a target, because the token before
            it belongs to another document.

    Raises:
        DataError: the dataset has fewer than two tokens, so there is nothing to predict.
    """

    rows_per_index = 1  # batch rows per index
    identity = "concat"

    def __init__(
        self,
        dataset: IndexedDataset,
        length: int,
        *,
        seed: int | None = None,
        vocab: int | None = None,
        isolate_documents: bool = False,
    ) -> None:
        self.dataset = dataset
        self._apart = isolate_documents
        self.length = length
        self._seed = seed
        self._vocab = vocab
        self._epochs: dict[int, _Epoch] = {}
        self._lock = threading.Lock()  # prefetch threads read sequences concurrently
        if len(dataset.tokens) < 2:
            raise DataError(
                f"{dataset.prefix}: has one token, so there is none to predict; add text"
            )

    def __len__(self) -> int:
        """Sequences in one epoch."""
        return -(-(len(self.dataset.tokens) - 1) // self.length)

    def sequence(self, index: int) -> np.ndarray:
        """Return the length + 1 tokens of a sequence; fewer for the last one of an epoch.

        Raises:
            DataError: a token id is outside the vocabulary.
        """
        return self._tokens(self._document_slices(index))

    def documents(self, index: int) -> np.ndarray:
        """Return the indices of the documents in a sequence, in order."""
        return self._document_slices(index).documents

    def batch(self, indices: Sequence[int] | np.ndarray) -> Batch:
        """Return the batch of these sequences; index -1 gives a row of padding."""
        rows = empty_batch(len(indices), self.length, self._apart)
        for row, index in enumerate(indices):
            if index >= 0:
                self._fill({name: array[row] for name, array in rows.items()}, int(index))
        return rows

    def _fill(self, row: Batch, index: int) -> None:
        """Write a sequence into the arrays of a row."""
        pieces = self._document_slices(index)
        tokens = self._tokens(pieces)
        row["tokens"][: len(tokens)] = tokens[: self.length]
        row["targets"][: len(tokens) - 1] = tokens[1:]
        row["weights"][: len(tokens) - 1] = 1
        if self._apart:
            numbers = np.repeat(np.arange(1, len(pieces.sizes) + 1), pieces.sizes)
            row["documents"][: len(tokens)] = numbers[: self.length]
            row["weights"][: len(tokens) - 1] = numbers[:-1] == numbers[1:]

    def _tokens(self, pieces: _DocumentSlices) -> np.ndarray:
        skips = pieces.starts - (np.cumsum(pieces.sizes) - pieces.sizes)
        positions = np.repeat(skips, pieces.sizes) + np.arange(pieces.sizes.sum())
        tokens = self.dataset.tokens[positions]
        ends = np.cumsum(pieces.sizes)
        check_tokens(
            self.dataset.prefix,
            tokens,
            self._vocab,
            lambda place: pieces.documents[np.searchsorted(ends, place, side="right")],
        )
        return tokens

    def _document_slices(self, index: int) -> _DocumentSlices:
        number, row = divmod(index, len(self))
        epoch = self._epoch(number)
        begin = row * self.length
        end = min(begin + self.length + 1, len(self.dataset.tokens))
        first = np.searchsorted(epoch.ends, begin, side="right")
        last = np.searchsorted(epoch.ends, end, side="left") + 1
        documents, ends = epoch.documents[first:last], epoch.ends[first:last]
        before = epoch.ends[first - 1] if first else 0
        begins = np.concatenate([[before], ends[:-1]])
        inside = np.maximum(begins, begin)
        sizes = np.minimum(ends, end) - inside
        starts = self.dataset.document_offsets[documents] + (inside - begins)
        full = sizes > 0  # a document may have no tokens
        return _DocumentSlices(documents[full], starts[full], sizes[full])

    def _epoch(self, number: int) -> _Epoch:
        if self._seed is None:
            number = 0  # every epoch has the same order
        with self._lock:
            if number not in self._epochs:
                while len(self._epochs) > 1:  # prefetching across the end of an epoch needs two
                    self._epochs.pop(min(self._epochs))
                self._epochs[number] = self._epoch_order(number)
            return self._epochs[number]

    def _epoch_order(self, number: int) -> _Epoch:
        count = len(self.dataset)
        order = np.arange(count) if self._seed is None else permutation(count, self._seed, number)
        return _Epoch(order, np.cumsum(np.diff(self.dataset.document_offsets)[order]))


def empty_batch(rows: int, length: int, isolate_documents: bool) -> Batch:
    """Return a batch of `rows` rows of padding."""
    batch = {
        "tokens": np.zeros((rows, length), np.int32),
        "targets": np.zeros((rows, length), np.int32),
        "weights": np.zeros((rows, length), np.float32),
    }
    if isolate_documents:
        batch["documents"] = np.zeros((rows, length), np.int32)
    return batch


def check_tokens(
    prefix: str, tokens: np.ndarray, vocab: int | None, document_at: Callable[[int], int]
) -> None:
    """Check that all token ids are in the vocabulary.

    Args:
        prefix: Path prefix of the dataset, for the message.
        tokens: Token ids.
        vocab: Vocabulary size. None: only negative ids are refused.
        document_at: Returns the document index of a position in `tokens`.

    Raises:
        DataError: a token id is outside the vocabulary; names the dataset and the document.
    """
    wrong = tokens < 0
    if vocab is not None:
        wrong |= tokens >= vocab
    if wrong.any():
        place = int(np.argmax(wrong))
        vocabulary = f"a vocabulary of {vocab}" if vocab else "any vocabulary"
        raise DataError(
            f"{prefix}: document {document_at(place)} contains token {tokens[place]}, which is "
            f"outside {vocabulary}; prepare the dataset with the tokenizer of the model, or "
            "increase program.model.vocab"
        )
