"""Records of a file, in groups of about a megabyte.

A record is what becomes one document: a JSON object or a text as bytes, or a row of a table as a
dictionary. Every group says where the next one begins, so that reading can go on from there.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

CHUNK = 1 << 20  # bytes of records, more or less

Record = bytes | dict[str, Any]
TextDocument = Literal["line", "paragraph", "file"]  # what of a text file is a document


class Place(NamedTuple):
    """Where in a file reading begins."""

    offset: int = 0  # bytes of unpacked text, or rows
    number: int = 1  # of the line or row there


@dataclass(frozen=True)
class Group:
    """Some records that follow one another in a file."""

    numbers: tuple[int, ...]  # of the lines or rows they begin at, from 1
    records: tuple[Record, ...]
    after: Place
    read: int  # bytes of the file so far, packed where it is


class Item(NamedTuple):
    """One record, with what a group of it alone would hold."""

    number: int
    record: Record
    after: Place
    read: int


def gathered(items: Iterable[Item]) -> Iterator[Group]:
    """Groups of single records."""
    waiting: list[Item] = []
    size = 0
    for item in items:
        waiting.append(item)
        size += _size(item.record)
        if size >= CHUNK:
            yield _group(waiting)
            waiting, size = [], 0
    if waiting:
        yield _group(waiting)


def _group(items: list[Item]) -> Group:
    numbers, records, _, _ = zip(*items, strict=True)
    return Group(numbers, records, items[-1].after, items[-1].read)


def _size(record: Any) -> int:
    """About the bytes of a record, or of what is in it."""
    if isinstance(record, bytes | str):
        return len(record) + 1
    if isinstance(record, dict):
        record = list(record.values())
    return 1 + sum(map(_size, record)) if isinstance(record, list) else 1
