"""Megatron-LM's indexed dataset: all tokens in PREFIX.bin, document positions in PREFIX.idx.

The .idx is little-endian: the magic, the version (uint64), a code for the dtype of a token (uint8),
the counts of sequences and of document boundaries (uint64 each), then the length of every sequence
in tokens (int32), its byte offset in the .bin (int64), and the document boundaries as sequence
indices, from 0 to the number of sequences (int64).

Source: megatron/core/datasets/indexed_dataset.py of https://github.com/NVIDIA/Megatron-LM
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from graphtrain.data.indexed.streamed_tokens import Blocks, StreamedTokens
from graphtrain.errors import DataError
from graphtrain.files import content_digest, missing_dataset_file

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}


def token_dtype(vocab: int) -> np.dtype:
    """Return the dtype that Megatron chooses for a vocabulary: uint16 if it fits, else int32."""
    return DTYPES[8] if vocab < 65500 else DTYPES[4]


def dataset_paths(prefix: str | Path) -> tuple[Path, Path]:
    """Return the paths of the .bin and the .idx of a dataset."""
    return Path(f"{prefix}.bin"), Path(f"{prefix}.idx")


def file_digests(prefix: str | Path) -> dict[str, str]:
    """Return the digests of the .bin and the .idx of a dataset, by suffix."""
    return {path.suffix[1:]: content_digest(path) for path in dataset_paths(prefix)}


@dataclass(frozen=True)
class IndexShare:
    """Share of an index that one of several processes checks, which all open the same dataset."""

    rank: int = 0
    processes: int = 1

    def of(self, length: int) -> slice:
        """Return the part of an array of this length."""
        return slice(
            self.rank * length // self.processes, (self.rank + 1) * length // self.processes
        )


WHOLE_INDEX = IndexShare()


class IndexedDataset:
    """Memory-mapped dataset on disk, opened without reading its tokens.

    Every field of the .idx is checked against the others and against the size of the .bin.

    Of the index, only the lengths are needed. Several processes therefore divide the check of the
    rest among them, so that a process reads 4 bytes for each document and not 20; they must agree
    afterwards that none of them has found damage.

    Args:
        prefix: Path prefix.
        share: Share of the index to check.
        one_sequence_each: Require that every document is one sequence, as graphtrain writes them.
            False: the document boundaries, as Megatron-LM may write them, are read in full.
        blocks: Blocks of the .bin, if it is not on this machine.
        allow_empty: Accept a dataset whose documents are all empty.

    Raises:
        DataError: a file is missing, empty, truncated, or does not agree with the other.
    """

    def __init__(
        self,
        prefix: str | Path,
        *,
        share: IndexShare = WHOLE_INDEX,
        one_sequence_each: bool = False,
        blocks: Blocks | None = None,
        allow_empty: bool = False,
    ) -> None:
        self.prefix = str(prefix)
        self._share = share
        self._tokens_path, self._index_path = dataset_paths(prefix)
        on_disk = [self._index_path] if blocks else [self._tokens_path, self._index_path]
        for path in on_disk:
            if not path.is_file():
                raise DataError(missing_dataset_file(self.prefix, path.suffix))
        self.dtype, sequences, boundaries = read_header(self._index_path)
        sizes, pointers, documents = self._read_index(sequences, boundaries)
        offsets = self._sequence_offsets(sizes, pointers)
        # In tokens: (documents + 1,).
        self.document_offsets: np.ndarray = (
            self._offsets_of_sequences(documents, offsets)
            if one_sequence_each
            else self._offsets_of_documents(documents, offsets)
        )
        if not offsets[-1] and not allow_empty:
            raise DataError(f"{self._index_path}: the dataset is empty; prepare it from some text")
        length = blocks.size if blocks else self._tokens_path.stat().st_size
        self._check_tokens_length(int(offsets[-1]), length)
        self.tokens: Any = (  # (tokens,), read as an array
            StreamedTokens(blocks, self.dtype) if blocks else _mapped(self._tokens_path, self.dtype)
        )

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self.document_offsets) - 1

    def document(self, index: int) -> np.ndarray:
        """Return the tokens of one document as a view of the file."""
        return self.tokens[self.document_offsets[index] : self.document_offsets[index + 1]]

    def _read_index(self, sequences: int, boundaries: int) -> tuple[np.ndarray, ...]:
        expected = HEADER.size + sequences * (4 + 8) + boundaries * 8
        length = self._index_path.stat().st_size
        if length == expected + sequences and sequences:
            raise DataError(
                f"{self._index_path}: from byte {expected} it contains modes of a multimodal "
                "dataset, which graphtrain does not read; prepare a dataset of the text only"
            )
        if length != expected or not boundaries:
            raise DataError(
                f"{self._index_path}: is {length} bytes long, but its header (bytes 18 to 33: "
                f"{sequences} sequences, {boundaries} document boundaries) needs {expected}; "
                "the file is truncated or damaged; prepare the dataset again"
            )
        body = np.memmap(self._index_path, np.uint8, mode="r", offset=HEADER.size)
        sizes, pointers, documents = np.split(body, [sequences * 4, sequences * 12])
        return sizes.view("<i4"), pointers.view("<i8"), documents.view("<i8")

    def _sequence_offsets(self, sizes: np.ndarray, pointers: np.ndarray) -> np.ndarray:
        """Return the token offset at which each sequence begins, and the end of the last one."""
        start = HEADER.size
        if sizes.size and sizes.min() < 0:
            first = int(np.argmax(sizes < 0))
            raise DataError(
                f"{self._index_path}: byte {start + 4 * first}: sequence {first} has a length of "
                f"{sizes[first]} tokens; the file is damaged, prepare the dataset again"
            )
        offsets = np.zeros(len(sizes) + 1, np.int64)
        np.cumsum(sizes, out=offsets[1:])
        part = self._share.of(len(sizes))
        mismatched = pointers[part] != offsets[:-1][part] * self.dtype.itemsize
        if mismatched.any():
            first = part.start + int(np.argmax(mismatched))
            raise DataError(
                f"{self._index_path}: byte {start + 4 * len(sizes) + 8 * first}: sequence {first} "
                f"has byte offset {pointers[first]} in the .bin, but the lengths before it add up "
                f"to {offsets[first] * self.dtype.itemsize} bytes; the file is damaged, prepare "
                "the dataset again"
            )
        return offsets

    def _offsets_of_sequences(self, documents: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Return the offsets of documents that are one sequence each."""
        part = self._share.of(len(offsets))
        is_valid = len(documents) == len(offsets) and np.array_equal(
            documents[part], np.arange(part.start, part.stop)
        )
        if not is_valid:
            raise self._boundaries_error(len(offsets) - 1)
        return offsets

    def _offsets_of_documents(self, documents: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Return the offsets of documents of any number of sequences."""
        sequences = len(offsets) - 1
        is_valid = (
            len(documents) > 0
            and documents[0] == 0
            and documents[-1] == sequences
            and bool((np.diff(documents) >= 0).all())
        )
        if not is_valid:
            raise self._boundaries_error(sequences)
        return offsets[documents]

    def _boundaries_error(self, sequences: int) -> DataError:
        return DataError(
            f"{self._index_path}: byte {HEADER.size + 12 * sequences}: the document boundaries "
            f"do not increase from 0 to {sequences}; the file is damaged, prepare the dataset "
            "again"
        )

    def _check_tokens_length(self, tokens: int, length: int) -> None:
        expected = tokens * self.dtype.itemsize
        if length != expected:
            raise DataError(
                f"{self._tokens_path}: is {length} bytes long, but {self._index_path.name} counts "
                f"{tokens} tokens of {self.dtype}, {expected} bytes; the file is truncated or "
                "belongs to another index; prepare the dataset again"
            )


def _mapped(path: Path, dtype: np.dtype) -> np.ndarray:
    """Return a file as an array; one without a byte cannot be mapped."""
    if not path.stat().st_size:
        return np.empty(0, dtype)
    return np.asarray(np.memmap(path, dtype, mode="r"))


def read_header(path: Path) -> tuple[np.dtype, int, int]:
    """Return the dtype of a token, and the numbers of sequences and boundaries, of an .idx.

    Raises:
        DataError: the file is not an index, or of another version.
    """
    with path.open("rb") as file:
        header = file.read(HEADER.size)
    if header[: len(MAGIC)] != MAGIC:
        raise DataError(
            f"{path}: bytes 0 to 8 are {header[:9]!r}, not {MAGIC!r}; "
            "this is not the index of a Megatron dataset"
        )
    if len(header) < HEADER.size:
        raise DataError(
            f"{path}: ends at byte {len(header)}, inside its header; prepare the dataset again"
        )
    _, version, code, sequences, boundaries = HEADER.unpack(header)
    if version != VERSION:
        raise DataError(f"{path}: byte 9: version {version} is not supported, only {VERSION} is")
    dtype = DTYPES.get(code)
    if dtype is None or dtype.kind == "f":
        name = dtype.name if dtype else "unknown"
        raise DataError(f"{path}: byte 17: dtype code {code} ({name}) is not an integer dtype")
    return dtype, sequences, boundaries
