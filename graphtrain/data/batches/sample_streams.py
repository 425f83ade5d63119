"""Infinite streams of samples: the order in which training reads a dataset or a blend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from graphtrain.data.batches.blend import Blend
from lowering.machine import startup


def shuffled_stream(count: int, seed: int, owner: int = 0) -> Any:
    """Return an infinite Grain dataset of (owner, sequence index) for one dataset, shuffled."""
    return (
        import_grain()
        .MapDataset.range(count)
        .shuffle(seed % 2**32)  # Grain's limit
        .repeat()  # reshuffles in each repetition
        .map_with_index(lambda position, row: np.array([owner, position // count * count + row]))
    )


def blended_stream(blend: Blend, counts: Sequence[int], seed: int) -> Any:
    """Return an infinite Grain dataset of (owner, sequence index) for a blend."""
    streams = [shuffled_stream(count, seed, owner) for owner, count in enumerate(counts)]

    def sample_at(position: int, _: int) -> np.ndarray:
        owner, index = blend.locate(position)
        return streams[owner][index]

    return import_grain().MapDataset.range(1).repeat().map_with_index(sample_at)


def import_grain() -> Any:
    """Import Grain without Orbax.

    Only training needs Grain. Its Orbax handlers are unused, and importing Orbax takes twice as
    long as the rest of Grain.
    """
    return startup.import_without("grain", "orbax.checkpoint")
