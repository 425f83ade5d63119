"""A fact that takes time to find out, found out again at most for a share of the time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, TypeVar

_T = TypeVar("_T")
_SHORTEST, _SHARE = 2.0, 0.05  # seconds between two times, and share of one processor


class SlowFact(Generic[_T]):
    """Result of a function, kept for at least 2 s and 20 times what the function took."""

    def __init__(self, find: Callable[[], _T]) -> None:
        self._find, self._next = find, 0.0
        self._found: _T | None = None

    def value(self) -> _T:
        """Return the last result, or a new one if it is old."""
        began = time.monotonic()
        if self._found is None or began >= self._next:
            self._found = self._find()
            ended = time.monotonic()
            self._next = ended + max(_SHORTEST, (ended - began) / _SHARE)
        return self._found
