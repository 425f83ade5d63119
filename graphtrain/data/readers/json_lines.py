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
from lowering.machine.extras import missing_extra

COMPRESSED_SUFFIXES = (".gz", ".zst")


def read_lines(
    path: Path, document: TextDocument, start: FilePosition, group_bytes: int | None = None
) -> Iterator[RecordGroup]:
    """Yield the documents of a file from a place on; blank ones are skipped.

    With document = "line", the file may also be one JSON array, whose elements are the documents.
    Groups have about `group_bytes` bytes; None: the usual number.

    Raises:
        DataError: the file does not exist, or is not compressed as its suffix says.
    """
    file_position = start
    with open_file(path) as raw, _decompression_errors(path, lambda: file_position):
        file = _decompressed(path, raw)
        is_array = document == "line" and is_json_array(file)
        file.seek(start.offset)
        if document == "line" and is_array:
            groups = group_records(array_items(path, file, raw, start), group_bytes)
        elif document == "line":
            groups = _lines(file, raw, start, group_bytes or records.GROUP_BYTES)
        elif document == "paragraph":
            groups = group_records(_paragraphs(file, raw, start), group_bytes)
        else:
            groups = group_records(_entire_file(file, raw, start), group_bytes)
        for group in groups:
            file_position = group.next_position
            yield group


def open_file(path: Path) -> BinaryIO:
    """Open a file for reading; raise a `DataError` if that fails."""
    if path.exists() and not path.is_file() and not path.is_dir():  # to open a pipe would wait
        raise DataError(f"{path}: is not a file; its content is read twice, so write it to one")
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
    raise missing_extra("backports.zstd", f"{path}: a .zst file")


@contextmanager
def _decompression_errors(path: Path, current_position: Any) -> Iterator[None]:
    """Turn decompression errors into a `DataError` with file and place."""
    kinds: tuple[type[Exception], ...] = (gzip.BadGzipFile, EOFError, zlib.error)
    if path.suffix == ".zst":
        kinds = (_zstd(path).ZstdError, EOFError)
    try:
        yield
    except kinds as error:
        kind = "gzip" if path.suffix == ".gz" else "zstd"
        position = current_position()
        raise DataError(
            f"{path}: after line {position.number - 1}, byte {position.offset} of the "
            f"decompressed text: damaged {kind} file ({error})"
        ) from None


def _lines(
    file: Any, raw: BinaryIO, start: FilePosition, group_bytes: int
) -> Iterator[RecordGroup]:
    offset, line_number = start
    while group := file.readlines(group_bytes):
        numbered_lines = [(line_number + i, line) for i, line in enumerate(group) if line.strip()]
        line_number += len(group)
        offset += sum(map(len, group))
        if numbered_lines:
            line_numbers, lines = zip(*numbered_lines, strict=True)
            yield RecordGroup(line_numbers, lines, FilePosition(offset, line_number), raw.tell())


def _paragraphs(file: Any, raw: BinaryIO, start: FilePosition) -> Iterator[LocatedRecord]:
    """Yield the paragraphs of a text: what is between blank lines."""
    offset, line_number = start
    lines: list[bytes] = []
    for line in file:
        offset += len(line)
        line_number += 1
        if line.strip():
            lines.append(line)
        elif lines:
            yield LocatedRecord(
                line_number - 1 - len(lines),
                b"".join(lines),
                FilePosition(offset, line_number),
                raw.tell(),
            )
            lines = []
    if lines:
        yield LocatedRecord(
            line_number - len(lines), b"".join(lines), FilePosition(offset, line_number), raw.tell()
        )


def _entire_file(file: Any, raw: BinaryIO, start: FilePosition) -> Iterator[LocatedRecord]:
    text = file.read()
    if text.strip():
        end = FilePosition(start.offset + len(text), start.number + text.count(b"\n") + 1)
        yield LocatedRecord(start.number, text, end, raw.tell())
