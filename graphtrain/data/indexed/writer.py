"""Writer of indexed datasets; its memory use does not grow with the corpus."""

import contextlib
import os
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NamedTuple

import numpy as np

from graphtrain.data.indexed.dataset import (
    DTYPES,
    HEADER,
    MAGIC,
    VERSION,
    dataset_paths,
    token_dtype,
)
from graphtrain.files import partial_path, sync_and_close, with_file_name

_CHUNK = 1 << 20  # sequences per step of the pointer computation


class WrittenCounts(NamedTuple):
    """Number of documents and tokens that are already written."""

    documents: int = 0
    tokens: int = 0


NOTHING_WRITTEN = WrittenCounts()


class IndexedWriter:
    """Writer of PREFIX.bin and PREFIX.idx; each document is one sequence.

    Use it as a context manager. Partial files are renamed to their final names when the block
    ends. If the block raises an error, they are deleted and a previous dataset stays unchanged. An
    interruption such as Ctrl-C leaves the partial files, from which another writer can resume.

    Args:
        prefix: Path prefix of the dataset.
        vocab: Vocabulary size; larger token ids are refused.
        dtype: Integer type of a token on disk. None: that of `token_dtype`.
        keep: Part of the partial files to keep when resuming.
    """

    def __init__(
        self,
        prefix: str | Path,
        vocab: int,
        *,
        dtype: np.dtype | None = None,
        keep: WrittenCounts = NOTHING_WRITTEN,
    ) -> None:
        self.vocab = vocab
        self.dtype = dtype or token_dtype(vocab)
        self.documents, self.token_count = self._kept = keep
        self._tokens_path, self._index_path = dataset_paths(prefix)

    def __enter__(self) -> "IndexedWriter":
        resumed = self._kept
        index_bytes = HEADER.size + 4 * resumed.documents if resumed.documents else 0
        self._tokens = _open(self._tokens_path, resumed.tokens * self.dtype.itemsize)
        try:
            self._index = _open(self._index_path, index_bytes)
        except BaseException:
            _discard(self._tokens, self._tokens_path)
            raise
        if not resumed.documents:
            self._index.write(bytes(HEADER.size))  # placeholder: the counts are not known yet
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None and not issubclass(kind, Exception):
            # Interrupted, for example by Ctrl-C: keep the partial files.
            self._tokens.close()
            self._index.close()
            return
        try:
            if kind is None:
                self.complete()
                self._rename()
        finally:
            _discard(self._tokens, self._tokens_path)
            _discard(self._index, self._index_path)

    @property
    def written(self) -> WrittenCounts:
        """Documents and tokens written so far, for `keep` of a later writer."""
        return WrittenCounts(self.documents, self.token_count)

    @property
    def nbytes(self) -> int:
        """Total bytes of the two files if they were finished now."""
        return self.token_count * self.dtype.itemsize + HEADER.size + self.documents * 20 + 8

    def append(self, tokens: np.ndarray) -> None:
        """Add one document."""
        self.extend(tokens, np.array([len(tokens)]))

    def extend(self, tokens: np.ndarray, sizes: np.ndarray) -> None:
        """Add documents whose tokens are concatenated; `sizes` are the tokens of each.

        Raises:
            ValueError: a token is outside the vocabulary, or the sizes do not add up.
            OSError: the disk is full; the error names the file.
        """
        if sizes.sum() != len(tokens) or (len(sizes) and sizes.max() > np.iinfo(np.int32).max):
            raise ValueError(f"sizes add up to {sizes.sum()} tokens, but {len(tokens)} were given")
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self.vocab:
            raise ValueError(f"a token is outside the vocabulary of {self.vocab}")
        with with_file_name(self._tokens_path):
            self._tokens.write(np.ascontiguousarray(tokens, self.dtype).data)
        with with_file_name(self._index_path):
            self._index.write(np.ascontiguousarray(sizes, "<i4").data)
        self.documents += len(sizes)
        self.token_count += len(tokens)

    def sync(self) -> None:
        """Flush everything to disk, so that a later writer can keep it.

        Raises:
            OSError: the disk is full; the error names the file.
        """
        for file, path in ((self._tokens, self._tokens_path), (self._index, self._index_path)):
            with with_file_name(path):
                file.flush()
                os.fsync(file.fileno())

    def complete(self) -> None:
        """Finish the partial files, except for renaming them; nothing can be added afterwards.

        Raises:
            OSError: the disk is full; the error names the file.
        """
        if self._index.closed:
            return
        with with_file_name(self._tokens_path):
            sync_and_close(self._tokens)
        with with_file_name(self._index_path):
            self._write_pointers()
            self._write_boundaries()
            self._index.seek(0)
            code = next(code for code, dtype in DTYPES.items() if dtype == self.dtype)
            counts = self.documents, self.documents + 1
            self._index.write(HEADER.pack(MAGIC, VERSION, code, *counts))
            sync_and_close(self._index)

    def _rename(self) -> None:
        # Without an index there is no dataset: at any moment a reader finds the old dataset, none,
        # or the new one, but never the tokens of one with the index of the other.
        self._index_path.unlink(missing_ok=True)
        partial_path(self._tokens_path).replace(self._tokens_path)
        partial_path(self._index_path).replace(self._index_path)

    def _write_pointers(self) -> None:
        end = 0
        for first in range(0, self.documents, _CHUNK):
            count = min(_CHUNK, self.documents - first)
            self._index.seek(HEADER.size + 4 * first)
            sizes = np.frombuffer(self._index.read(4 * count), "<i4")
            ends = end + np.cumsum(sizes, dtype=np.int64)
            pointers = np.concatenate([[end], ends[:-1]]) * self.dtype.itemsize
            self._index.seek(0, 2)
            self._index.write(pointers.astype("<i8").data)
            end = int(ends[-1])

    def _write_boundaries(self) -> None:
        self._index.seek(0, 2)
        for first in range(0, self.documents + 1, _CHUNK):
            last = min(first + _CHUNK, self.documents + 1)
            self._index.write(np.arange(first, last, dtype="<i8").data)


def _open(path: Path, keep: int) -> BinaryIO:
    """Open a partial file, truncated to the first `keep` bytes of an earlier writer."""
    mode = "r+b" if keep else "w+b"
    file: BinaryIO = partial_path(path).open(mode, buffering=1 << 20)  # type: ignore[assignment]
    file.truncate(keep)
    file.seek(keep)
    return file


def _discard(file: BinaryIO, path: Path) -> None:
    """Close and remove a partial file, if it was not renamed."""
    with contextlib.suppress(OSError):  # the disk is full; the buffered data is not needed
        file.close()
    partial_path(path).unlink(missing_ok=True)
