"""Parts of arrays that have more rows in a program than where they are stored."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from graphtrain.weights.files import Index


def zeros_of(index: Index) -> np.ndarray:
    """Return zeros in float32 of the shape of a part."""
    return np.zeros([axis_slice.stop - axis_slice.start for axis_slice in index], np.float32)


def padded_part(
    read: Callable[[Index], np.ndarray], shape: tuple[int, ...], index: Index
) -> np.ndarray:
    """Return a part in float32, with zeros outside the stored array.

    Args:
        read: Reads a part of the stored array; it may return fewer rows, as a slice does.
        shape: Of the stored array.
        index: Slices with start and stop.
    """
    inside = tuple(
        slice(min(one.start, size), min(one.stop, size))
        for one, size in zip(index, shape, strict=True)
    )
    values = read(inside)
    if values.shape == tuple(one.stop - one.start for one in index):
        return values.astype(np.float32, copy=False)
    padded = zeros_of(index)
    padded[tuple(slice(size) for size in values.shape)] = values
    return padded


def is_stored_unpadded(
    stored: tuple[int, ...], shape: tuple[int, ...], padded: int, unpadded: int
) -> bool:
    """Return whether a stored array has a shape, or has it with another size of padded axes.

    Args:
        stored: Shape of the stored array.
        shape: Shape in the program.
        padded: Size of an axis with padding.
        unpadded: Size of that axis without padding.
    """
    return len(stored) == len(shape) and all(
        found == size or (found, size) == (unpadded, padded)
        for found, size in zip(stored, shape, strict=True)
    )
