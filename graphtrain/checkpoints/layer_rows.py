"""How a run keeps its layers, stacked along the first axes of arrays, and one way from another.

Only pipelines differ: theirs are stacked in rounds, or with rows that fill up short stages.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Index = tuple[slice | int, ...]
Rows = tuple[int | None, ...]  # the layer in each row; None fills up a stage


@dataclass(frozen=True)
class Stacked:
    """One array of a state: its whole shape, and the layers in its rows."""

    path: str
    shape: tuple[int, ...]
    rows: Rows
    in_layers: bool | None = None  # None: the path says it, as that of a native model does

    @property
    def leading(self) -> tuple[int, ...]:
        """Sizes of the axes that the rows are counted along; none outside of the layers."""
        inside = "layers" in self.path.split("/") if self.in_layers is None else self.in_layers
        if not inside:
            return ()
        for axes in (1, 2):
            if math.prod(self.shape[:axes]) == len(self.rows):
                return self.shape[:axes]
        raise ValueError(f"{self.path}: {self.shape} is not of {len(self.rows)} rows")

    @property
    def plain(self) -> tuple[int, ...]:
        """The shape without a pipeline: a row for each layer."""
        layers = len([layer for layer in self.rows if layer is not None])
        inner = self.shape[len(self.leading) :]
        return (layers, *inner) if self.leading else self.shape


def part(
    wanted: Stacked,
    kept: Stacked,
    index: Index,
    read: Callable[[Index], np.ndarray],
    dtype: np.dtype,
) -> np.ndarray:
    """A part of an array in the arrangement wanted, by reads of the same array as it is kept.

    Args:
        wanted: The array as it shall be.
        kept: The array as it is.
        index: Into the array wanted.
        read: A part of the array kept.
        dtype: Of both.
    """
    leading = wanted.leading
    if not leading:
        return read(index)
    numbers = np.array([-1 if layer is None else layer for layer in wanted.rows])
    here = numbers.reshape(leading)[index[: len(leading)]]
    row_of = {layer: row for row, layer in enumerate(kept.rows) if layer is not None}
    inner, sizes = index[len(leading) :], wanted.shape[len(leading) :]
    spans = [
        len(range(*one.indices(size)))
        for one, size in zip(inner, sizes, strict=True)
        if isinstance(one, slice)
    ]
    made = np.zeros((*here.shape, *spans), dtype)
    for at, layer in np.ndenumerate(here):
        if layer >= 0:
            row = np.unravel_index(row_of[int(layer)], kept.leading)
            made[at] = read((*map(int, row), *inner))
    return made
