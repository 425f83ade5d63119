"""Reading of JSON lines, JSON arrays and text files, plain or compressed."""

import gzip
import importlib
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from graphtrain.data.readers import records
from graphtrain.data.readers.json_array import array_items, is_json_array
from graphtrain.data.readers.records import (
    FilePosition,
    LocatedRecord,
    RecordGroup,
    TextDocument,
    group_records,
)
from graphtrain.errors import DataError

COMPRESSED_SUFFIXES = (".gz", ".zst")


def read_lines(path: Path, document: TextDocument, start: FilePosition) -> Iterator[RecordGroup]:
    """Yield the documents of a file from a place on; blank ones are skipped.

    With document = "line", the file may also be one JSON array, whose elements are the documents.

    Raises:
        DataError: the file does not exist, or is not compressed as its suffix says.
    """
    place = start
    with open_file(path) as raw, _decompression_errors(path, lambda: place):
        file = _decompressed(path, raw)
        is_array = document == "line" and is_json_array(file)
        file.seek(start.offset)
        if document == "line" and is_array:
            groups = group_records(array_items(path, file, raw, start))
        elif document == "line":
            groups = _lines(file, raw, start)
        elif document == "paragraph":
            groups = group_records(_paragraphs(file, raw, start))
        else:
            groups = group_records(_entire_file(file, raw, start))
        for group in groups:
            place = group.next_position
            yield group


def open_file(path: Path) -> BinaryIO:
    """Open a file for reading; raise a `DataError` if that fails."""
    try:
        return path.open("rb")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None


def _decompressed(path: Path, raw: BinaryIO) -> Any:
    if path.suffix == ".gz":
        return gzip.GzipFile(fileobj=raw)
    if path.suffix == ".zst":
        return _zstd(path).ZstdFile(raw)
    return raw


def _zstd(path: Path) -> Any:
    for name in ("compression.zstd", "backports.zstd"):  # the first exists from Python 3.14 on
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    raise DataError(f"{path}: reading .zst needs backports.zstd; pip install 'graphtrain[data]'")


@contextmanager
def _decompression_errors(path: Path, place: Any) -> Iterator[None]:
    """Turn decompression errors into a `DataError` with file and place."""
    kinds: tuple[type[Exception], ...] = (gzip.BadGzipFile, EOFError, zlib.error)
    if path.suffix == ".zst":
        kinds = (_zstd(path).ZstdError, EOFError)
    try:
        yield
    except kinds as error:
        kind = "gzip" if path.suffix == ".gz" else "zstd"
        at = place()
        raise DataError(
            f"{path}: after line {at.number - 1}, byte {at.offset} of the decompressed text: "
            f"damaged {kind} file ({error})"
        ) from None


def _lines(file: Any, raw: BinaryIO, start: FilePosition) -> Iterator[RecordGroup]:
    offset, number = start
    while group := file.readlines(records.GROUP_BYTES):
        kept = [(number + i, line) for i, line in enumerate(group) if line.strip()]
        number += len(group)
        offset += sum(map(len, group))
        if kept:
            numbers, lines = zip(*kept, strict=True)
            yield RecordGroup(numbers, lines, FilePosition(offset, number), raw.tell())


def _paragraphs(file: Any, raw: BinaryIO, start: FilePosition) -> Iterator[LocatedRecord]:
    """Yield the paragraphs of a text: what is between blank lines."""
    offset, number = start
    lines: list[bytes] = []
    for line in file:
        offset += len(line)
        number += 1
        if line.strip():
            lines.append(line)
        elif lines:
            yield LocatedRecord(
                number - 1 - len(lines), b"".join(lines), FilePosition(offset, number), raw.tell()
            )
            lines = []
    if lines:
        yield LocatedRecord(
            number - len(lines), b"".join(lines), FilePosition(offset, number), raw.tell()
        )


def _entire_file(file: Any, raw: BinaryIO, start: FilePosition) -> Iterator[LocatedRecord]:
    text = file.read()
    if text.strip():
        end = FilePosition(start.offset + len(text), start.number + text.count(b"\n") + 1)
        yield LocatedRecord(start.number, text, end, raw.tell())
