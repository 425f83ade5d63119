"""Several datasets in one stream of sequences, in fixed proportions."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from graphtrain.errors import DataError

_PERIOD = 1 << 20  # sequences after which the pattern repeats; shares are exact to one in so many


class Part(Protocol):
    """A dataset of a blend, and either its weight or its epochs."""

    @property
    def dataset(self) -> str: ...

    @property
    def weight(self) -> float | None:
        """Its share of the sequences, relative to the weights of the others."""
        ...

    @property
    def epochs(self) -> float | None:
        """How often it is read while the others are read as often as theirs say."""
        ...


class Blend:
    """Which dataset has the sequence at a position of the stream, and which of its own it is.

    The sequences of each are spread evenly: the first n hold as many of a dataset as its share of
    n, but for one or two. The answer for a position needs no other position.
    """

    def __init__(self, counts: np.ndarray) -> None:
        """Blend datasets of which a period has these counts of sequences, all positive."""
        self.counts = counts
        owners = np.repeat(np.arange(len(counts)), counts)
        numbers = np.concatenate([np.arange(count) for count in counts])
        order = np.argsort((numbers + 0.5) / counts[owners], kind="stable")
        self._owners, self._numbers = owners[order], numbers[order]

    def place(self, position: int) -> tuple[int, int]:
        """The dataset of a position, and the number of the sequence among that dataset's."""
        period, slot = divmod(position, len(self._owners))
        owner = int(self._owners[slot])
        return owner, period * int(self.counts[owner]) + int(self._numbers[slot])


def blend_counts(parts: Sequence[Part], lengths: Sequence[int]) -> np.ndarray:
    """How many sequences of each dataset a period of the stream holds.

    With epochs, a period is every dataset as often as it says, where that is not too long.

    Args:
        parts: of the blend.
        lengths: sequences in one epoch of each dataset.

    Raises:
        DataError: a share is too small to be kept.
    """
    wanted = np.array(
        [
            part.weight if part.weight is not None else (part.epochs or 0.0) * length
            for part, length in zip(parts, lengths, strict=True)
        ]
    )
    by_epochs = parts[0].epochs is not None and wanted.sum() <= _PERIOD
    counts = np.rint(wanted if by_epochs else wanted / wanted.sum() * _PERIOD).astype(np.int64)
    if not counts.all():
        part = parts[int(np.argmin(counts))]
        raise DataError(
            f"{part.dataset}: its share of the blend, {wanted.min() / wanted.sum():.2g}, is too "
            "small to be kept; give it more, or leave it out"
        )
    return counts // np.gcd.reduce(counts)
