"""Order of layer rows in stacked arrays, and conversion from one order to another.

Layers are stacked along the first axes of an array. Without a pipeline they are in their natural
order; a pipeline stacks them by virtual stage, or adds padding rows to stages with fewer layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Index = tuple[slice | int, ...]
Rows = tuple[int | None, ...]  # the layer in each row; None for a padding row


@dataclass(frozen=True)
class Stacked:
    """Array of a state: its unsharded shape, and the layer in each of its rows."""

    path: str
    shape: tuple[int, ...]
    rows: Rows
    in_layers: bool | None = None  # rows are layers; None: if the path has "layers"

    @property
    def leading(self) -> tuple[int, ...]:
        """Sizes of the leading axes that stack the layers; empty outside the layers."""
        inside = "layers" in self.path.split("/") if self.in_layers is None else self.in_layers
        if not inside:
            return ()
        for axes in (1, 2):
            if math.prod(self.shape[:axes]) == len(self.rows):
                return self.shape[:axes]
        raise ValueError(
            f"{self.path}: the first axes of shape {self.shape} are not {len(self.rows)} rows"
        )

    @property
    def plain(self) -> tuple[int, ...]:
        """Shape without a pipeline: one row per layer."""
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
    """Return a part of an array in another order of layer rows; padding rows are zeros.

    Args:
        wanted: The array in the new order.
        kept: The array in the stored order.
        index: The part, as an index into the new array.
        read: Reads a part of the stored array.
        dtype: Dtype of both arrays.
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
