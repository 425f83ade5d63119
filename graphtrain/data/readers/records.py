"""Records of a file, in groups of about a megabyte.

A record is the source of one document or preference pair: a JSON object or a text as bytes, or a
table row as a dictionary. Every group contains the place where the next one begins, so that reading
can resume from there.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

GROUP_BYTES = 1 << 20  # approximate bytes of the records of a group

Record = bytes | dict[str, Any]
TextDocument = Literal["line", "paragraph", "file"]  # unit of a text file that is a document


class FilePosition(NamedTuple):
    """Place in a file at which reading starts."""

    offset: int = 0  # bytes of decompressed text, or rows
    number: int = 1  # line or row number, from 1


@dataclass(frozen=True)
class RecordGroup:
    """Consecutive records of a file."""

    numbers: tuple[int, ...]  # line or row at which each record begins, from 1
    records: tuple[Record, ...]
    next_position: FilePosition  # at which the next group begins
    read: int  # bytes read so far, of the compressed file if it is compressed


class LocatedRecord(NamedTuple):
    """A single record with the fields of a `Group`."""

    number: int
    record: Record
    next_position: FilePosition
    read: int


def group_records(
    items: Iterable[LocatedRecord], group_bytes: int | None = None
) -> Iterator[RecordGroup]:
    """Collect single records into groups of about `group_bytes` bytes; None: of GROUP_BYTES."""
    group_bytes = group_bytes or GROUP_BYTES
    pending: list[LocatedRecord] = []
    size = 0
    for item in items:
        pending.append(item)
        size += _size(item.record)
        if size >= group_bytes:
            yield _group(pending)
            pending, size = [], 0
    if pending:
        yield _group(pending)


def _group(items: list[LocatedRecord]) -> RecordGroup:
    line_numbers, records, _, _ = zip(*items, strict=True)
    return RecordGroup(line_numbers, records, items[-1].next_position, items[-1].read)


def _size(record: Any) -> int:
    """Estimate the bytes of a record or of a value in it."""
    if isinstance(record, bytes | str):
        return len(record) + 1
    if isinstance(record, dict):
        record = list(record.values())
    return 1 + sum(map(_size, record)) if isinstance(record, list) else 1
