"""Arrays while a graph is written: their elements, their node in the graph, or their parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class ArrayValue:
    """An array: known elements (data), a node of the graph, or parts that were written into it.

    Loops are unrolled, and a loop that stacks its results writes one slice in each iteration. Such
    an array is represented by its parts, so that reading one of them costs nothing, and the array
    is assembled once instead of in each iteration.
    """

    shape: Shape
    dtype: str  # HLO's name of the stored type
    node: str | None = None
    data: np.ndarray | None = None
    stacked: SliceUpdates | None = None

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True, eq=False)
class SliceUpdates:
    """Slices along one axis that overwrite parts of an array."""

    base: ArrayValue
    axis: int
    # By start index along the axis.
    parts: Mapping[int, ArrayValue] = field(default_factory=lambda: MappingProxyType({}))

    def with_part(self, start: int, part: ArrayValue) -> SliceUpdates | None:
        """Return a copy with one more slice; None if it overlaps one that it does not replace."""
        size = part.shape[self.axis]
        for other_start, other_part in self.parts.items():
            is_disjoint = (
                other_start + other_part.shape[self.axis] <= start or start + size <= other_start
            )
            if not is_disjoint and (other_start != start or other_part.shape != part.shape):
                return None
        return SliceUpdates(self.base, self.axis, {**self.parts, start: part})


def constant_value(data: np.ndarray, dtype: str) -> ArrayValue:
    """Return a Value with known elements."""
    return ArrayValue(tuple(data.shape), dtype, data=data)
