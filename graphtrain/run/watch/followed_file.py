"""A file of lines that another process appends to, read from where the last read ended."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_CHUNK = 4 << 20  # bytes of one read: some tenths of a second to parse
_TAIL = 64  # bytes before the position, by which a file that was replaced is recognized


class FollowedFile:
    """File of lines, followed as it grows.

    A file that was replaced, as that of a resumed run is, or that has become shorter is read again
    from its beginning: `generation` is then another number.
    """

    def __init__(self, path: Path, chunk: int = _CHUNK) -> None:
        self._path, self._chunk = path, chunk
        self._offset, self._tail = 0, b""
        self._identity: tuple[int, int] | None = None
        self._is_in_long_line = False
        self.generation = 0
        self.size = 0  # bytes, at the last read
        self.is_behind = False  # whether there was more to read than a chunk
        self.long_lines = 0  # that are longer than a chunk, and so are none of ours
        self.problem: str | None = None  # why it cannot be read; None: it can, or does not exist

    @property
    def remaining(self) -> int:
        """Bytes that are not read yet, up to the last read's end of the file."""
        return max(0, self.size - self._offset)

    @property
    def exists(self) -> bool:
        """Return whether the file was there at the last read."""
        return self._identity is not None

    def read(self) -> list[bytes]:
        """Return the next complete lines, up to a chunk; a last line without end is left."""
        self.problem, self.is_behind = None, False
        try:  # not blocked by a FIFO
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK)
        except FileNotFoundError:
            self._restart(None)
            return []
        except OSError as error:
            self.problem = f"{self._path.name} cannot be read: {error.strerror}"
            return []
        try:
            return self._read(descriptor)
        except OSError as error:
            self.problem = f"{self._path.name} cannot be read: {error.strerror}"
            return []
        finally:
            os.close(descriptor)

    def _read(self, descriptor: int) -> list[bytes]:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            self.problem = f"{self._path.name} is not a regular file"
            return []
        identity = status.st_dev, status.st_ino
        if identity != self._identity or not self._continues(descriptor, status.st_size):
            self._restart(identity)
        self.size = status.st_size
        content = os.pread(descriptor, self._chunk, self._offset)
        self.is_behind = len(content) == self._chunk
        end = content.rfind(b"\n") + 1
        if not end and self.is_behind:  # no record is so long
            self.long_lines += not self._is_in_long_line
            self._is_in_long_line = True
            self._advance(content)
            return []
        self._advance(content[:end])
        lines = content[:end].split(b"\n")[:-1]
        if lines and self._is_in_long_line:
            self._is_in_long_line = False
            del lines[0]  # the end of the long one
        return lines

    def _continues(self, descriptor: int, size: int) -> bool:
        """Return whether what was read is still before the position."""
        if size < self._offset:
            return False
        return os.pread(descriptor, len(self._tail), self._offset - len(self._tail)) == self._tail

    def _advance(self, content: bytes) -> None:
        self._offset += len(content)
        self._tail = (self._tail + content)[-_TAIL:]

    def _restart(self, identity: tuple[int, int] | None) -> None:
        if self._identity is not None:
            self.generation += 1
        self._identity, self._offset, self._tail = identity, 0, b""
        self._is_in_long_line, self.long_lines, self.size = False, 0, 0
