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

from graphtrain.data.batches.sources import SourceDataset
from graphtrain.data.indexed.dataset import IndexedDataset
from graphtrain.data.indexed.streamed_tokens import StreamedTokens
from graphtrain.data.shuffle import permutation
from graphtrain.errors import DataError

# tokens (inputs) and targets int32, weights (loss mask) float32 and, if documents are isolated,
# documents (segment ids) int32: each (sequences, length). If documents have images, images uint8:
# (sequences, images, height, width, 3).
Batch = dict[str, np.ndarray]
_NO_DOCUMENTS = np.array([], np.int64)


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
        dataset: IndexedDataset | SourceDataset,
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

    def prefetch(self, indices: np.ndarray) -> None:
        """Begin to fetch the tokens of these sequences, if the dataset is streamed."""
        if isinstance(tokens := self.dataset.tokens, StreamedTokens):
            parts = [self._document_slices(int(index)) for index in indices if index >= 0]
            tokens.prefetch(
                np.concatenate([part.starts for part in parts] or [_NO_DOCUMENTS]),
                np.concatenate([part.sizes for part in parts] or [_NO_DOCUMENTS]),
            )

    def batch(self, indices: Sequence[int] | np.ndarray) -> Batch:
        """Return the batch of these sequences; index -1 gives a row of padding."""
        rows = empty_batch(len(indices), self.length, self._apart)
        for row, index in enumerate(indices):
            if index >= 0:
                self._fill({name: array[row] for name, array in rows.items()}, int(index))
        return rows

    def _fill(self, row: Batch, index: int) -> None:
        """Write a sequence into the arrays of a row."""
        slices = self._document_slices(index)
        tokens = self._tokens(slices)
        row["tokens"][: len(tokens)] = tokens[: self.length]
        row["targets"][: len(tokens) - 1] = tokens[1:]
        row["weights"][: len(tokens) - 1] = 1
        if self._apart:
            segment_ids = np.repeat(np.arange(1, len(slices.sizes) + 1), slices.sizes)
            row["documents"][: len(tokens)] = segment_ids[: self.length]
            row["weights"][: len(tokens) - 1] = segment_ids[:-1] == segment_ids[1:]

    def _tokens(self, slices: _DocumentSlices) -> np.ndarray:
        shifts = slices.starts - (np.cumsum(slices.sizes) - slices.sizes)
        positions = np.repeat(shifts, slices.sizes) + np.arange(slices.sizes.sum())
        tokens = self.dataset.tokens[positions]
        ends = np.cumsum(slices.sizes)
        check_tokens(
            self.dataset.prefix,
            tokens,
            self._vocab,
            lambda position: slices.documents[np.searchsorted(ends, position, side="right")],
        )
        return tokens

    def _document_slices(self, index: int) -> _DocumentSlices:
        epoch_index, row = divmod(index, len(self))
        epoch = self._epoch(epoch_index)
        row_start = row * self.length
        row_end = min(row_start + self.length + 1, len(self.dataset.tokens))
        first_document = np.searchsorted(epoch.ends, row_start, side="right")
        last_document = np.searchsorted(epoch.ends, row_end, side="left") + 1
        documents, document_ends = (
            epoch.documents[first_document:last_document],
            epoch.ends[first_document:last_document],
        )
        previous_end = epoch.ends[first_document - 1] if first_document else 0
        document_starts = np.concatenate([[previous_end], document_ends[:-1]])
        slice_starts = np.maximum(document_starts, row_start)
        sizes = np.minimum(document_ends, row_end) - slice_starts
        starts = self.dataset.document_offsets[documents] + (slice_starts - document_starts)
        non_empty = sizes > 0  # a document may have no tokens
        return _DocumentSlices(documents[non_empty], starts[non_empty], sizes[non_empty])

    def _epoch(self, epoch_index: int) -> _Epoch:
        if self._seed is None:
            epoch_index = 0  # every epoch has the same order
        with self._lock:
            if epoch_index not in self._epochs:
                while len(self._epochs) > 1:  # prefetching across the end of an epoch needs two
                    self._epochs.pop(min(self._epochs))
                self._epochs[epoch_index] = self._epoch_order(epoch_index)
            return self._epochs[epoch_index]

    def _epoch_order(self, epoch_index: int) -> _Epoch:
        count = len(self.dataset)
        order = (
            np.arange(count) if self._seed is None else permutation(count, self._seed, epoch_index)
        )
        return _Epoch(order, np.cumsum(np.diff(self.dataset.document_offsets)[order]))


def empty_batch(
    rows: int, length: int, isolate_documents: bool, image_shape: tuple[int, ...] | None = None
) -> Batch:
    """Return a batch of `rows` rows of padding.

    Args:
        rows: Number of rows.
        length: Tokens of a row.
        isolate_documents: Add the segment ids.
        image_shape: Shape of the images of a row. None: rows have no images.
    """
    batch = {
        "tokens": np.zeros((rows, length), np.int32),
        "targets": np.zeros((rows, length), np.int32),
        "weights": np.zeros((rows, length), np.float32),
    }
    if isolate_documents:
        batch["documents"] = np.zeros((rows, length), np.int32)
    if image_shape is not None:
        batch["images"] = np.zeros((rows, *image_shape), np.uint8)
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
    invalid = tokens < 0
    if vocab is not None:
        invalid |= tokens >= vocab
    if invalid.any():
        position = int(np.argmax(invalid))
        vocabulary = f"a vocabulary of {vocab}" if vocab else "any vocabulary"
        raise DataError(
            f"{prefix}: document {document_at(position)} contains token {tokens[position]}, which "
            f"is outside {vocabulary}; prepare the dataset with the tokenizer of the model, or "
            "increase program.model.vocab"
        )
