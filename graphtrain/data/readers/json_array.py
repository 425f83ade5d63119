"""Reading of a JSON array of records element by element, without loading all of it."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from graphtrain.data.readers.records import FilePosition, LocatedRecord
from graphtrain.errors import DataError

_BLOCK = 1 << 20  # bytes read at a time
_OUTSIDE = re.compile(rb'["\[\]{}]')
_INSIDE = re.compile(rb'["\\]')  # inside a string
_BETWEEN = b" \t\r\n,"


def is_json_array(file: Any) -> bool:
    """Return True if the first byte that is not blank opens a JSON array."""
    file.seek(0)
    while block := file.read(_BLOCK):
        if block := block.lstrip(b"\xef\xbb\xbf \t\r\n"):
            return block.startswith(b"[")
    return False


def array_items(
    path: Path, file: Any, raw: BinaryIO, start: FilePosition
) -> Iterator[LocatedRecord]:
    """Yield the elements of an array from a place on; offset 0 is before the opening bracket.

    Raises:
        DataError: the file ends within the array.
    """
    scanner = _Scanner(start)
    if not start.offset:
        scanner.open(file)
    while block := file.read(_BLOCK):
        for element, line_number, next_position in scanner.elements(block):
            yield LocatedRecord(line_number, element, next_position, raw.tell())
        if scanner.ended:
            return
    raise DataError(
        f"{path}: ends at line {scanner.number}, byte {scanner.offset}, inside its JSON array; the "
        "file is truncated"
    )


class _Scanner:
    """Scanner that finds the ends of elements; it does not validate their content."""

    def __init__(self, start: FilePosition) -> None:
        self.offset, self.number = start  # position of the first waiting byte
        self.ended = False
        self._waiting = b""
        self._at = 0  # waiting bytes that have been scanned
        self._depth = 0
        self._in_string = False

    def open(self, file: Any) -> None:
        """Skip the opening bracket."""
        while (byte := file.read(1)) != b"[":
            self.offset, self.number = self.offset + 1, self.number + byte.count(b"\n")
        self.offset += 1

    def elements(self, block: bytes) -> Iterator[tuple[bytes, int, FilePosition]]:
        """Yield the elements completed by a block, each with its first line and the place after."""
        self._waiting += block
        while (end := self._end()) is not None:
            element = self._waiting[:end]
            content = element.lstrip(_BETWEEN)
            line_number = self.number + element[: len(element) - len(content)].count(b"\n")
            self.offset += end
            self.number += element.count(b"\n")
            self._waiting, self._at = self._waiting[end:], 0
            if content := content.rstrip():
                yield content, line_number, FilePosition(self.offset, self.number)
            if self.ended:
                return

    def _end(self) -> int | None:
        """Return the end of the first element in the waiting bytes; None if it is incomplete."""
        while True:
            pattern = _INSIDE if self._in_string else _OUTSIDE
            match = pattern.search(self._waiting, self._at)
            if match is None:
                self._at = len(self._waiting)
                return None
            delimiter, self._at = match.group(), match.end()
            if delimiter == b"\\":
                if self._at == len(self._waiting):
                    self._at -= 1  # the escaped byte is in the next block
                    return None
                self._at += 1
            elif delimiter == b'"':
                self._in_string = not self._in_string
            elif delimiter in b"[{":
                self._depth += 1
            elif self._depth == 0:
                self.ended = True
                return match.start()
            else:
                self._depth -= 1
                if self._depth == 0:
                    return match.end()
