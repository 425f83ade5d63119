"""Blending of several datasets into one stream of sequences, in fixed proportions."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from graphtrain.errors import DataError

_PERIOD = 1 << 20  # maximum sequences before the pattern repeats; the resolution of shares


class WeightedDataset(Protocol):
    """Dataset of a blend, with either a weight or a number of epochs."""

    @property
    def dataset(self) -> str:
        """Path prefix of the dataset."""
        ...

    @property
    def weight(self) -> float | None:
        """Share of the sequences, relative to the weights of the other parts."""
        ...

    @property
    def epochs(self) -> float | None:
        """Passes over this dataset per period, relative to the epochs of the other parts."""
        ...


class Blend:
    """Mapping from positions of the stream to datasets and their sequences.

    Each dataset is spread evenly: the number of its sequences among the first n differs from its
    share of n by at most one or two. The mapping of a position depends on no other position.
    """

    def __init__(self, counts: np.ndarray) -> None:
        """Build the mapping from the positive counts of sequences of each dataset per period."""
        self.counts = counts
        owners = np.repeat(np.arange(len(counts)), counts)
        indices = np.concatenate([np.arange(count) for count in counts])
        order = np.argsort((indices + 0.5) / counts[owners], kind="stable")
        self._owners, self._numbers = owners[order], indices[order]

    def locate(self, position: int) -> tuple[int, int]:
        """Return the index of the dataset of a position and of the sequence in that dataset."""
        period, slot = divmod(position, len(self._owners))
        owner = int(self._owners[slot])
        return owner, period * int(self.counts[owner]) + int(self._numbers[slot])


def blend_counts(parts: Sequence[WeightedDataset], lengths: Sequence[int]) -> np.ndarray:
    """Return the number of sequences of each dataset in one period of the stream.

    With epochs, a period contains each dataset `epochs` times, unless that exceeds the maximum
    length of a period; then only the proportions are kept.

    Args:
        parts: Parts of the blend.
        lengths: Sequences in one epoch of each dataset.

    Raises:
        DataError: a share rounds to no sequence in a period.
    """
    expected = np.array(
        [
            entry.weight if entry.weight is not None else (entry.epochs or 0.0) * length
            for entry, length in zip(parts, lengths, strict=True)
        ]
    )
    use_epochs = parts[0].epochs is not None and expected.sum() <= _PERIOD
    counts = np.rint(expected if use_epochs else expected / expected.sum() * _PERIOD).astype(
        np.int64
    )
    if not counts.all():
        entry = parts[int(np.argmin(counts))]
        raise DataError(
            f"{entry.dataset}: its share of the blend, {expected.min() / expected.sum():.2g}, is "
            "too small; increase its weight or epochs, or remove the dataset"
        )
    return counts // np.gcd.reduce(counts)
