"""Order of layer rows in stacked arrays, and conversion from one order to another.

Layers are stacked along the first axes of an array. Without a pipeline they are in their natural
order; a pipeline stacks them by virtual stage, or adds padding rows to stages with fewer layers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from sharding_rules.pipeline import LayerRows, rows_of_periods

Index = tuple[slice | int, ...]


@dataclass(frozen=True)
class StackedArray:
    """Array of a state: its unsharded shape, and the layer in each of its rows."""

    path: str
    shape: tuple[int, ...]
    rows: LayerRows
    is_stacked: bool | None = None  # rows are layers; None: if the path has "layers"

    @property
    def leading_shape(self) -> tuple[int, ...]:
        """Sizes of the leading axes that stack the layers; empty outside the layers."""
        is_stacked = (
            "layers" in self.path.split("/") if self.is_stacked is None else self.is_stacked
        )
        if not is_stacked:
            return ()
        for axes in (1, 2):
            if math.prod(self.shape[:axes]) == len(self.rows):
                return self.shape[:axes]
        raise ValueError(
            f"{self.path}: the first axes of shape {self.shape} are not {len(self.rows)} rows"
        )

    @property
    def shape_without_pipeline(self) -> tuple[int, ...]:
        """Shape without a pipeline: one row per layer."""
        layers = len([layer for layer in self.rows if layer is not None])
        inner = self.shape[len(self.leading_shape) :]
        return (layers, *inner) if self.leading_shape else self.shape


def stacked_pair(
    path: str,
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    rows: tuple[LayerRows, LayerRows],
) -> tuple[StackedArray, StackedArray] | None:
    """Return an array in two orders of layers, recognized by its shapes; None if it is not stacked.

    Of layers that repeat after a period, an array stacks those at one position of it, so that a row
    stands for a period.

    Args:
        path: Path of the array.
        shapes: Unsharded shape in both orders.
        rows: Layers of both orders, as of an array that stacks all layers.
    """
    for leading in itertools.product((1, 2), repeat=2):
        inner = [shape[axes:] for shape, axes in zip(shapes, leading, strict=True)]
        counts = [math.prod(shape[:axes]) for shape, axes in zip(shapes, leading, strict=True)]
        first, second = (rows_of_periods(*pair) for pair in zip(rows, counts, strict=True))
        if inner[0] == inner[1] and first and second and {*first} - {None} == {*second} - {None}:
            return (
                StackedArray(path, shapes[0], first, is_stacked=True),
                StackedArray(path, shapes[1], second, is_stacked=True),
            )
    return None


def stacked_pairs(
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]],
    rows: tuple[LayerRows, LayerRows],
) -> dict[str, tuple[StackedArray, StackedArray]]:
    """Return the arrays whose shapes differ because two programs stack layers in another order.

    Args:
        shapes: Unsharded shapes of each array in both orders, by path.
        rows: Layers of both orders.

    Returns:
        The arrays in both orders, by path. Empty: the orders differ, and no shape tells of which
        arrays.
    """
    found = {
        path: stacked_pair(path, both, rows) for path, both in shapes.items() if both[0] != both[1]
    }
    return {path: pair for path, pair in found.items() if pair is not None}


def read_reordered_part(
    target_array: StackedArray,
    stored_array: StackedArray,
    index: Index,
    read: Callable[[Index], np.ndarray],
    dtype: np.dtype,
) -> np.ndarray:
    """Return a part of an array in another order of layer rows; padding rows are zeros.

    Args:
        target_array: The array in the new order.
        stored_array: The array in the stored order.
        index: The part, as an index into the new array.
        read: Reads a part of the stored array.
        dtype: Dtype of both arrays.
    """
    leading = target_array.leading_shape
    if not leading:
        return read(index)
    layer_of_row = np.array([-1 if layer is None else layer for layer in target_array.rows])
    part_layers = layer_of_row.reshape(leading)[index[: len(leading)]]
    row_of = {layer: row for row, layer in enumerate(stored_array.rows) if layer is not None}
    inner, sizes = index[len(leading) :], target_array.shape[len(leading) :]
    spans = [
        len(range(*dim_index.indices(size)))
        for dim_index, size in zip(inner, sizes, strict=True)
        if isinstance(dim_index, slice)
    ]
    result = np.zeros((*part_layers.shape, *spans), dtype)
    for position, layer in np.ndenumerate(part_layers):
        if layer >= 0:
            row = np.unravel_index(row_of[int(layer)], stored_array.leading_shape)
            result[position] = read((*map(int, row), *inner))
    return result
