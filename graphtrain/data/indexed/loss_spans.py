"""Loss mask of a dataset of conversations: PREFIX_learned.bin and .idx.

The files are an indexed dataset too: its document i lists the begin and the end of every span to
train on in document i of PREFIX, in tokens from the beginning of that document.
"""

from pathlib import Path

import numpy as np

from graphtrain.data.indexed.dataset import DTYPES, WHOLE_INDEX, IndexedDataset, IndexShare
from graphtrain.data.indexed.writer import NOTHING_WRITTEN, IndexedWriter, WrittenCounts
from graphtrain.errors import DataError

SPAN_DTYPE = DTYPES[4]  # int32
_SUFFIX = "_learned"


def loss_spans_prefix(prefix: str | Path) -> str:
    """Return the path prefix of the loss mask of a dataset."""
    return f"{prefix}{_SUFFIX}"


def loss_spans_writer(prefix: str | Path, keep: WrittenCounts = NOTHING_WRITTEN) -> IndexedWriter:
    """Return the writer of the loss mask of the dataset `prefix`."""
    limit = int(np.iinfo(SPAN_DTYPE).max)
    return IndexedWriter(loss_spans_prefix(prefix), limit, dtype=SPAN_DTYPE, keep=keep)


class LossSpans:
    """Loss mask of a dataset, as spans of tokens.

    Args:
        dataset: The dataset.
        share: Share of the index of the loss mask to check.

    Raises:
        DataError: the files are missing, damaged, or belong to another dataset.
    """

    def __init__(self, dataset: IndexedDataset, share: IndexShare = WHOLE_INDEX) -> None:
        self._spans = IndexedDataset(
            loss_spans_prefix(dataset.prefix), share=share, one_sequence_each=True
        )
        if len(self._spans) != len(dataset) or self._spans.dtype != SPAN_DTYPE:
            raise DataError(
                f"{self._spans.prefix}.idx: contains the loss masks of {len(self._spans)} "
                f"documents, but {dataset.prefix} has {len(dataset)}; prepare both again"
            )

    def spans(self, document: int) -> np.ndarray:
        """Return begin and end of each span to train on in a document: (spans, 2)."""
        return self._spans.document(document).reshape(-1, 2)

    def mask(self, document: int, size: int) -> np.ndarray:
        """Return the loss mask of the first `size` tokens of a document: (size,) bool."""
        changes = np.zeros(size + 1, np.int32)
        np.add.at(changes, np.minimum(self.spans(document), size), [1, -1])
        return np.cumsum(changes[:-1]) > 0

    def first(self, documents: np.ndarray) -> np.ndarray:
        """Return the begin of the first span of each of some documents: (documents,)."""
        return self._spans.tokens[self._spans.document_offsets[documents]]

    def count(self) -> int:
        """Return the total number of tokens in the loss mask."""
        ends = self._spans.tokens
        return int(ends[1::2].sum(dtype=np.int64) - ends[::2].sum(dtype=np.int64))

    def check(self, dataset: IndexedDataset) -> None:
        """Check every span against its document in `dataset`.

        Raises:
            DataError: a span is not inside its document, or spans are not in order.
        """
        offsets = self._spans.document_offsets
        for document, size in enumerate(np.diff(dataset.document_offsets)):
            spans = self._spans.document(document)
            is_ordered = len(spans) % 2 == 0 and (np.diff(spans) >= 0).all()
            if not len(spans) or not is_ordered or spans[0] < 0 or spans[-1] > size:
                raise DataError(
                    f"{self._spans.prefix}.bin: byte {offsets[document] * SPAN_DTYPE.itemsize}: "
                    f"the loss mask of document {document} is not a list of ordered spans within "
                    f"its {size} tokens; prepare the dataset again"
                )
