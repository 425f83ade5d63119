"""Text to train on: files of JSON lines, read in chunks that know where they came from."""

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from graphtrain.data.order import chosen
from graphtrain.errors import DataError

_CHUNK = 1 << 20  # bytes of text, more or less
_SPLIT = 0x73706C6974  # keeps this choice apart from other uses of the same seed


@dataclass(frozen=True)
class Chunk:
    """Some documents of one file, unparsed."""

    path: Path
    numbers: tuple[int, ...]  # of the lines in the file, from 1
    lines: tuple[bytes, ...]
    first_document: int  # the number of the first in the whole corpus
    read: int  # bytes of all files read so far, compressed where they are


@dataclass(frozen=True)
class Corpus:
    """Files of documents, and which of these are for validation."""

    paths: tuple[Path, ...]
    key: str
    validation: float  # fraction of the documents
    seed: int

    @property
    def nbytes(self) -> int:
        """The length of all files, compressed where they are."""
        return sum(path.stat().st_size for path in self.paths)

    def chunks(self) -> Iterator[Chunk]:
        return read_chunks(self.paths)

    def is_validation(self, chunk: Chunk) -> np.ndarray:
        """A mask over the documents of a chunk: the number of each and the seed decide."""
        numbers = np.arange(chunk.first_document, chunk.first_document + len(chunk.lines))
        return chosen(numbers, self.validation, _SPLIT, self.seed)


def read_chunks(paths: Sequence[Path]) -> Iterator[Chunk]:
    """The lines of files, one after another; blank ones are not documents. Unpacks .gz.

    Raises:
        DataError: a file does not exist, or is not the gzip file its name says.
    """
    documents = finished = 0
    for path in paths:
        with _open(path) as raw:
            for numbers, lines in _line_groups(path, raw):
                yield Chunk(path, numbers, lines, documents, finished + raw.tell())
                documents += len(lines)
            finished += raw.tell()


def texts(chunk: Chunk, key: str) -> list[str]:
    """The text of each document of a chunk.

    Raises:
        DataError: a line is not a JSON object with a string under the key; names file and line.
    """
    return [
        _text(line, key, f"{chunk.path}: line {number}")
        for number, line in zip(chunk.numbers, chunk.lines, strict=True)
    ]


def content_digest(path: Path) -> str:
    """The digest of a file's bytes, whatever its name."""
    digest = hashlib.sha256()
    with _open(path) as file:
        while block := file.read(_CHUNK):
            digest.update(block)
    return digest.hexdigest()


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None


def _line_groups(path: Path, raw: BinaryIO) -> Iterator[tuple[tuple[int, ...], tuple[bytes, ...]]]:
    file = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
    number = 1
    try:
        while group := file.readlines(_CHUNK):
            kept = [(number + i, line) for i, line in enumerate(group) if line.strip()]
            number += len(group)
            if kept:
                numbers, lines = zip(*kept, strict=True)
                yield numbers, lines
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path}: after line {number - 1}: damaged gzip file ({error})") from None


def _text(line: bytes, key: str, place: str) -> str:
    try:
        document = json.loads(line)
    except ValueError as error:  # also of bytes that are not UTF-8
        raise DataError(f"{place}: not JSON ({error}); each line must be one JSON object") from None
    if not isinstance(document, dict):
        raise DataError(f"{place}: not a JSON object, as in {{{json.dumps(key)}: ...}}")
    if key not in document:
        found = ", ".join(map(repr, list(document)[:5])) or "nothing"
        raise DataError(f"{place}: no key {key!r}, only {found}; choose one with --key")
    text = document[key]
    if not isinstance(text, str):
        raise DataError(f"{place}: {key!r} is not a string but {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{place}: {key!r} is not valid Unicode ({error.reason})") from None
    return text
