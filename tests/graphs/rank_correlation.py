"""Spearman's correlation of ranks."""

import statistics
from collections.abc import Sequence


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the correlation of ranks; 0 if all values of a sequence are equal."""
    first, second = _ranks(one), _ranks(other)
    if len({*first}) == 1 or len({*second}) == 1:
        return 0.0
    return statistics.correlation(first, second)


def _ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of each value; equal ones have the mean of theirs."""
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]
