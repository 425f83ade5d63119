"""Which tokens of a dataset of conversations are learned: PREFIX_learned.bin and .idx.

An indexed dataset, too: document i holds, for every part to learn of document i of PREFIX, where it
begins and where it ends, in tokens from the beginning of the document.
"""

from pathlib import Path

import numpy as np

from graphtrain.data.indexed.dataset import DTYPES, IndexedDataset
from graphtrain.data.indexed.writer import NOTHING, IndexedWriter, Written
from graphtrain.errors import DataError

SPANS = DTYPES[4]  # int32
_SUFFIX = "_learned"


def learned_prefix(prefix: str | Path) -> str:
    return f"{prefix}{_SUFFIX}"


def spans_writer(prefix: str | Path, keep: Written = NOTHING) -> IndexedWriter:
    """Of the spans of PREFIX."""
    limit = int(np.iinfo(SPANS).max)
    return IndexedWriter(learned_prefix(prefix), limit, dtype=SPANS, keep=keep)


class Learned:
    """The spans of a dataset.

    Raises:
        DataError: the files are not there, damaged, or of another dataset.
    """

    def __init__(self, dataset: IndexedDataset) -> None:
        self._spans = IndexedDataset(learned_prefix(dataset.prefix))
        if len(self._spans) != len(dataset) or self._spans.dtype != SPANS:
            raise DataError(
                f"{self._spans.prefix}.idx: has the learned parts of {len(self._spans)} documents "
                f"and {dataset.prefix} has {len(dataset)}; prepare both again"
            )

    def spans(self, document: int) -> np.ndarray:
        """Begin and end of each learned part: (spans, 2)."""
        return self._spans.document(document).reshape(-1, 2)

    def mask(self, document: int, size: int) -> np.ndarray:
        """Whether each of a document's tokens, the first `size`, is learned."""
        changes = np.zeros(size + 1, np.int32)
        np.add.at(changes, np.minimum(self.spans(document), size), [1, -1])
        return np.cumsum(changes[:-1]) > 0

    def first(self) -> np.ndarray:
        """Where the first learned part of each document begins."""
        return self._spans.tokens[self._spans.document_offsets[:-1]]

    def count(self) -> int:
        """Learned tokens in all."""
        ends = self._spans.tokens
        return int(ends[1::2].sum(dtype=np.int64) - ends[::2].sum(dtype=np.int64))

    def check(self, dataset: IndexedDataset) -> None:
        """Compare with a dataset to the last span.

        Raises:
            DataError: a span is not inside its document, or spans are not in order.
        """
        offsets = self._spans.document_offsets
        for document, size in enumerate(np.diff(dataset.document_offsets)):
            spans = self._spans.document(document)
            in_order = len(spans) % 2 == 0 and (np.diff(spans) >= 0).all()
            if not len(spans) or not in_order or spans[0] < 0 or spans[-1] > size:
                raise DataError(
                    f"{self._spans.prefix}.bin: byte {offsets[document] * SPANS.itemsize}: the "
                    f"learned parts of document {document} are not in order within its {size} "
                    "tokens; prepare the dataset again"
                )
