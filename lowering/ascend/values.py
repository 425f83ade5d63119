"""What is known of an array while a graph is written: its elements, where it is, or its parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Value:
    """An array: known here (data), a node of the graph, or one that was written into in parts.

    Loops are unrolled, and a loop that stacks what it computes writes one slice in each turn. Such
    an array is kept as its parts, so that reading one of them costs nothing and the whole is put
    together once, not once in each turn.
    """

    shape: Shape
    dtype: str  # as it is stored, by HLO's name
    node: str | None = None
    data: np.ndarray | None = None
    stacked: Stacked | None = None

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True, eq=False)
class Stacked:
    """Slices along one axis that were written over an array."""

    base: Value
    axis: int
    parts: Mapping[int, Value] = field(default_factory=lambda: MappingProxyType({}))  # by start

    def with_part(self, start: int, part: Value) -> Stacked | None:
        """With one slice more; None if it overlaps another that is not the same one."""
        size = part.shape[self.axis]
        for other, held in self.parts.items():
            apart = other + held.shape[self.axis] <= start or start + size <= other
            if not apart and (other != start or held.shape != part.shape):
                return None
        return Stacked(self.base, self.axis, {**self.parts, start: part})


def known(data: np.ndarray, dtype: str) -> Value:
    """An array whose elements are known."""
    return Value(tuple(data.shape), dtype, data=data)
