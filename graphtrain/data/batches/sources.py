"""Datasets that code of the user makes: documents of token ids by their index, without a file."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from graphtrain.errors import DataError

# Sources by the reference that names them in a configuration. A source has len(source), source[i],
# a `digest` and, if it knows them, `sizes`; docs/guides/bring-your-own.md describes them.
Sources = Mapping[str, Any]
NO_SOURCES: Sources = MappingProxyType({})


class SourceDataset:
    """Documents of a source, read as those of an `IndexedDataset` are.

    Without `sizes`, every document is read once, because the order of the tokens in the batches
    follows from the sizes of all documents.

    Args:
        prefix: Reference of the source, for messages.
        source: The source.

    Raises:
        DataError: the source is not one, or is empty.
    """

    def __init__(self, prefix: str, source: Any) -> None:
        self.prefix, self._source = prefix, source
        count = self._read("len", lambda: len(source))
        if not count:
            raise DataError(f"{prefix}: has no documents")
        self.has_mask = isinstance(self._read("document 0", lambda: source[0]), tuple)
        sizes = self._declared_sizes(count)
        if sizes is None:
            sizes = np.array([len(self.document(index)) for index in range(count)], np.int64)
        self.document_offsets: np.ndarray = np.concatenate([[0], np.cumsum(sizes)])
        if not self.document_offsets[-1]:
            raise DataError(f"{prefix}: its documents have no tokens")
        self.tokens = SourceTokens(self)

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self.document_offsets) - 1

    def document(self, index: int) -> np.ndarray:
        """Return the tokens of one document.

        Raises:
            DataError: the source failed, or its document is not of tokens, or of another size than
                the source declares.
        """
        return self._document(index)[0]

    def mask(self, index: int) -> np.ndarray:
        """Return the loss mask of one document, (tokens,) bool."""
        mask = self._document(index)[1]
        assert mask is not None, "the source has loss masks"
        return mask

    def _document(self, index: int) -> tuple[np.ndarray, np.ndarray | None]:
        where = f"document {index}"
        value = self._read(where, lambda: self._source[int(index)])
        tokens, mask = value if isinstance(value, tuple) else (value, None)
        tokens = self._array(tokens, where)
        if tokens.dtype.kind not in "iu" and len(tokens):
            raise DataError(f"{self.prefix}: {where} has {tokens.dtype}, not integers")
        offsets = getattr(self, "document_offsets", None)
        if offsets is not None and len(tokens) != offsets[index + 1] - offsets[index]:
            raise DataError(
                f"{self.prefix}: {where} has {len(tokens)} tokens, and had "
                f"{offsets[index + 1] - offsets[index]} or declares as many in sizes; a source "
                "gives the same document each time"
            )
        if (mask is not None) != self.has_mask or (mask is not None and len(mask) != len(tokens)):
            raise DataError(
                f"{self.prefix}: {where}: every document has a loss mask with a value for each "
                "token, or none has"
            )
        return tokens.astype(np.int64), None if mask is None else self._array(mask, where) != 0

    def _array(self, values: Any, where: str) -> np.ndarray:
        array = np.asarray(values)
        if array.ndim != 1:
            raise DataError(f"{self.prefix}: {where} has {array.ndim} dimensions, not 1")
        return array

    def _declared_sizes(self, count: int) -> np.ndarray | None:
        declared = self._read("sizes", lambda: getattr(self._source, "sizes", None))
        if declared is None:
            return None
        sizes = self._array(declared, "sizes").astype(np.int64)
        if len(sizes) != count or (sizes < 0).any():
            raise DataError(
                f"{self.prefix}: sizes must have a number for each of {count} documents"
            )
        return sizes

    def _read(self, where: str, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except DataError:
            raise
        except Exception as error:
            raise DataError(f"{self.prefix}: {where}: {type(error).__name__}: {error}") from error


class SourceTokens:
    """All tokens of a source, one document after another, by their positions."""

    def __init__(self, dataset: SourceDataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return int(self._dataset.document_offsets[-1])

    def __getitem__(self, positions: np.ndarray) -> np.ndarray:
        """Return the tokens at positions; each of their documents is read once."""
        offsets = self._dataset.document_offsets
        documents = np.searchsorted(offsets, positions, side="right") - 1
        tokens = np.empty(len(positions), np.int64)
        for document in np.unique(documents):
            inside = documents == document
            tokens[inside] = self._dataset.document(document)[positions[inside] - offsets[document]]
        return tokens


class SourceMasks:
    """Loss masks of a source, read as `LossSpans` are."""

    def __init__(self, dataset: SourceDataset) -> None:
        self._dataset = dataset

    def mask(self, document: int, size: int) -> np.ndarray:
        """Return the loss mask of the first `size` tokens of a document: (size,) bool."""
        return self._dataset.mask(document)[:size]

    def first(self, documents: np.ndarray) -> np.ndarray:
        """Return the first token in the loss mask of each of some documents, or else its size."""
        masks = (self._dataset.mask(int(index)) for index in documents)
        return np.array([mask.argmax() if mask.any() else len(mask) for mask in masks])


def check_source(reference: str, source: Any) -> None:
    """Check that a source has what is needed to identify it.

    Raises:
        DataError: it lacks something; names it.
    """
    missing = [name for name in ("__len__", "__getitem__") if not hasattr(source, name)]
    if missing:
        raise DataError(f"{reference}: a dataset needs {' and '.join(missing)}")
    digest = getattr(source, "digest", None)
    if not isinstance(digest, str) or not digest:
        raise DataError(
            f"{reference}: a dataset needs a digest, a string that differs when its documents do, "
            "for example the SHA-256 of the files that it reads"
        )
