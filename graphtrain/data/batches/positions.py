"""Positions in a stream of batches, as checkpoints record them."""

from __future__ import annotations

from typing import Any

from graphtrain.errors import DataError


def step_and_sample(state: dict[str, Any], samples_per_batch: int) -> tuple[int, int]:
    """Return the next step and the next sample of a position."""
    step = number_in(state, "step")
    return step, number_in(state, "sample") if "sample" in state else step * samples_per_batch


def number_in(state: dict[str, Any], name: str) -> int:
    """Return a number of a position.

    Raises:
        DataError: it is damaged.
    """
    value = state.get(name)
    if type(value) is not int or value < 0:
        raise DataError(f"the position of the data is damaged: its {name} is {value!r:.80}")
    return value
