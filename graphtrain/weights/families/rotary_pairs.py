"""Order of the dimensions that rotary positions rotate: pairs of neighbours, or of halves.

Some families rotate neighbours, (0, 1), (2, 3) and so on. The decoder rotates (i, i + half): its
weights of queries and keys have the dimensions of a head in another order, which leaves the
products of queries with keys as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from graphtrain.config.schema import Model


def to_halves(array: np.ndarray, model: Model) -> list[np.ndarray]:
    """Order the rotated dimensions of the last axis by halves."""
    return [_reordered(array, model, "halves")]


def to_neighbours(arrays: Sequence[np.ndarray], model: Model) -> np.ndarray:
    """Undo to_halves."""
    return _reordered(arrays[0], model, "neighbours")


def _reordered(array: np.ndarray, model: Model, order: str) -> np.ndarray:
    turned, others = array[..., : model.rotary_dim], array[..., model.rotary_dim :]
    sizes = (-1, 2) if order == "halves" else (2, -1)
    pairs = turned.reshape(*turned.shape[:-1], *sizes)
    return np.concatenate([pairs.swapaxes(-1, -2).reshape(turned.shape), others], axis=-1)
