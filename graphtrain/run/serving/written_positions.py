"""Positions that an engine has written in each slot, and which prefixes it can still reuse."""

from __future__ import annotations

from collections.abc import Sequence

from graphtrain.models.attention.cache_layout import is_rolling


class WrittenPositions:
    """Record of the last position that was written in each slot since its sequence began.

    In a rolling buffer, each position overwrites an earlier one. What is written includes the
    padding of a chunk, and one position more: `decode` computes slots that are not active too, and
    writes at the position after their tokens.

    Args:
        slots: Number of slots.
        context_length: Number of tokens that a sequence may have.
        chunk: Number of new tokens of a call, at most, padding included.
        shortest: Number of positions of the layer that caches the fewest.
    """

    def __init__(self, slots: int, context_length: int, chunk: int, shortest: int) -> None:
        self._has_rolling_buffers = is_rolling(shortest, context_length)
        self._chunk, self._shortest = chunk, shortest
        self._tokens = [0] * slots  # of the sequence of each slot
        self._end = [0] * slots  # after the last position that was written

    def prefill(self, slot: int, offset: int, tokens: int, size: int) -> None:
        """Record tokens from position `offset` on, padded to `size`; a sequence begins at 0."""
        earlier = self._end[slot] if offset else 0
        self._tokens[slot] = offset + tokens
        self._end[slot] = max(earlier, offset + size, offset + tokens + 1)

    def decode(self, slot: int, tokens: int) -> None:
        """Record generated tokens."""
        self._tokens[slot] += tokens
        self._end[slot] = max(self._end[slot], self._tokens[slot] + 1)

    def decode_beams(self, parents: Sequence[int], position: int) -> None:
        """Record one token at a position in the first slots, which continue those of `parents`."""
        ends = [max(self._end[parent], position + 1) for parent in parents]
        self._end[: len(ends)] = ends

    def copy(self, source: int, destination: int) -> None:
        """Record that a slot holds what another one holds."""
        self._tokens[destination], self._end[destination] = self._tokens[source], self._end[source]

    def can_reuse(self, slot: int, length: int) -> bool:
        """Return whether a sequence can continue the first `length` tokens that a slot held.

        It sees window - 1 positions before them, and a rolling buffer has at least
        window + chunk - 1: they are there if at most `chunk` positions were written after
        `length`, or as many in all as the shortest buffer has.
        """
        if not self._has_rolling_buffers or not length:
            return True
        return self._end[slot] <= max(self._shortest, length + self._chunk)
