"""A JSON array of records, as many data sets are published, read an element at a time."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from graphtrain.data.readers.records import Item, Place
from graphtrain.errors import DataError

_BLOCK = 1 << 20  # bytes read at a time
_OUTSIDE = re.compile(rb'["\[\]{}]')
_INSIDE = re.compile(rb'["\\]')  # a string
_BETWEEN = b" \t\r\n,"


def begins_array(file: Any) -> bool:
    """Whether the first byte that is not blank is that of an array."""
    file.seek(0)
    while block := file.read(_BLOCK):
        if block := block.lstrip(b"\xef\xbb\xbf \t\r\n"):
            return block.startswith(b"[")
    return False


def array_items(path: Path, file: Any, raw: BinaryIO, start: Place) -> Iterator[Item]:
    """The elements of an array from a place on; at the beginning, its bracket is still to come.

    Raises:
        DataError: the file ends within the array.
    """
    scanner = _Scanner(start)
    if not start.offset:
        scanner.open(file)
    while block := file.read(_BLOCK):
        for element, number, after in scanner.elements(block):
            yield Item(number, element, after, raw.tell())
        if scanner.ended:
            return
    raise DataError(
        f"{path}: ends at line {scanner.number}, byte {scanner.offset}, inside its array; the file "
        "is truncated"
    )


class _Scanner:
    """Finds where elements end; what they hold is for a parser to judge."""

    def __init__(self, start: Place) -> None:
        self.offset, self.number = start  # of what is waiting
        self.ended = False
        self._waiting = b""
        self._at = 0  # bytes of it that have been looked at
        self._depth = 0
        self._in_string = False

    def open(self, file: Any) -> None:
        """Step over the bracket."""
        while (byte := file.read(1)) != b"[":
            self.offset, self.number = self.offset + 1, self.number + byte.count(b"\n")
        self.offset += 1

    def elements(self, block: bytes) -> Iterator[tuple[bytes, int, Place]]:
        """The elements that are whole now, with the line they begin at and the place after."""
        self._waiting += block
        while (end := self._end()) is not None:
            element = self._waiting[:end]
            content = element.lstrip(_BETWEEN)
            number = self.number + element[: len(element) - len(content)].count(b"\n")
            self.offset += end
            self.number += element.count(b"\n")
            self._waiting, self._at = self._waiting[end:], 0
            if content := content.rstrip():
                yield content, number, Place(self.offset, self.number)
            if self.ended:
                return

    def _end(self) -> int | None:
        """Where the first element of what is waiting ends, if that is known."""
        while True:
            pattern = _INSIDE if self._in_string else _OUTSIDE
            found = pattern.search(self._waiting, self._at)
            if found is None:
                self._at = len(self._waiting)
                return None
            mark, self._at = found.group(), found.end()
            if mark == b"\\":
                if self._at == len(self._waiting):
                    self._at -= 1  # what it stands before is in the next block
                    return None
                self._at += 1
            elif mark == b'"':
                self._in_string = not self._in_string
            elif mark in b"[{":
                self._depth += 1
            elif self._depth == 0:
                self.ended = True
                return found.start()
            else:
                self._depth -= 1
                if self._depth == 0:
                    return found.end()
