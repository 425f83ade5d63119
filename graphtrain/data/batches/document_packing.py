"""Packing of uncut documents: best-fit packing, or one document per row with padding.

A document of n tokens occupies n - 1 positions of a row, so none of its targets is in another
document. Targets of a conversation outside its loss mask have weight 0. The rows of a dataset are
the same in every epoch; the loader shuffles them.
"""

import warnings
from collections.abc import Sequence
from typing import Literal

import numpy as np

from graphtrain.data.batches.best_fit import best_fit, best_fit_with_images
from graphtrain.data.batches.concat_packing import Batch, check_tokens, empty_batch
from graphtrain.data.batches.sources import SourceDataset, SourceMasks
from graphtrain.data.indexed.dataset import IndexedDataset
from graphtrain.data.indexed.images import ImageFiles
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
        images: Images of the documents. None: they have none.
        images_per_row: Images that a row has room for.

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
        images: ImageFiles | None = None,
        images_per_row: int = 0,
    ) -> None:
        self.dataset, self.length, self._length_name = dataset, length, length_name
        self.rows_per_index = 2 if pairs else 1  # batch rows per index
        self.identity = f"{'best_fit' if fit and not pairs else 'pad'}, overlong: {overlong}"
        self._learned, self._vocab, self._apart = loss_spans, vocab, isolate_documents
        self._images, self._images_per_row = images, images_per_row
        if images is not None:
            self.identity += f", images: {images_per_row}"
        documents = self._usable_documents(overlong, pairs)
        if pairs:
            starts = np.arange(0, len(documents) + 1, 2)
        elif fit:
            sizes = self._positions_used(documents)
            row_of = self._rows_of(documents, sizes)
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
        images = self._images and (self._images_per_row, *self._images.settings.shape)
        rows = len(indices) * self.rows_per_index
        batch = empty_batch(rows, self.length, self._apart, images)
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
        start = image = 0
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
            if self._images:
                images = self._images.of(document)
                row["images"][image : image + len(images)] = images
                image += len(images)
            start = end

    def _rows_of(self, documents: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Return the row of each document, by best-fit packing."""
        images = None if self._images is None else self._images.counts[documents]
        if images is None or not images.any():
            return best_fit(sizes, self.length)
        return best_fit_with_images(sizes, images, self.length, self._images_per_row)

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
        if self._images:
            is_usable &= self._has_room_for_images(self._images, overlong)
        if pairs:
            is_usable = np.repeat(is_usable.reshape(-1, 2).all(axis=1), 2)
        if is_overlong.any():
            self._report_overlong(overlong, is_overlong, is_usable, sizes)
        if not is_usable.any():
            raise DataError(
                f"{self.dataset.prefix}: no document can be used; increase {self._length_name}, or "
                "add documents of at least 2 tokens"
            )
        return np.flatnonzero(is_usable)

    def _has_room_for_images(self, images: ImageFiles, overlong: Overlong) -> np.ndarray:
        """Return whether a row has room for the images of each document: (documents,) bool."""
        if overlong == "truncate":
            raise DataError(
                f'{self.dataset.prefix}: run.data.overlong = "truncate" would cut documents with '
                'images, whose placeholders belong together; set it to "error" or "drop"'
            )
        has_room = images.counts <= self._images_per_row
        if has_room.all():
            return has_room
        first = int(np.argmin(has_room))
        message = (
            f"{self.dataset.prefix}: document {first} has {images.counts[first]} images, but a row "
            f"takes program.model.images = {self._images_per_row}; {(~has_room).sum()} of "
            f"{len(has_room)} documents have more, at most {images.counts.max()}"
        )
        if overlong == "error":
            raise DataError(
                f'{message}; increase it, or set run.data.overlong to "drop" to leave them out'
            )
        warnings.warn(f"{message}; they are left out", stacklevel=1)
        return has_room

    def _report_overlong(
        self, overlong: Overlong, is_overlong: np.ndarray, is_usable: np.ndarray, sizes: np.ndarray
    ) -> None:
        longest = int(sizes.argmax())
        message = (
            f"{self.dataset.prefix}: {is_overlong.sum()} of {len(is_overlong)} documents are "
            f"longer than {self._length_name} = {self.length} (the longest, document {longest}, "
            f"has {sizes[longest]} tokens)"
        )
        if overlong == "error":
            cut = "" if self._images else '"truncate" to keep their beginning or to '
            raise DataError(
                f'{message}; set run.data.overlong to {cut}"drop" to leave them out, or increase '
                f"{self._length_name}"
            )
        warnings.warn(
            f"{message}; {(is_overlong & is_usable).sum()} are cut, "
            f"{(~is_usable).sum()} are left out",
            stacklevel=1,
        )
