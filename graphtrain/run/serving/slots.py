"""Slots of an engine: which are free, and whose cached tokens begin a prompt (prefix caching)."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

MIN_COPY = 16  # tokens; fewer are computed again sooner than copied


@dataclass(frozen=True)
class Placement:
    """Slot for a prompt, and the part of its KV cache that exists already."""

    slot: int
    source: int  # slot whose KV cache has the prefix; `slot` itself: nothing to copy
    length: int  # tokens of the prefix


class Slots:
    """Record of the tokens whose keys and values each slot of an engine holds.

    Args:
        count: Number of slots.
        can_reuse: Returns whether the engine can continue the first tokens that a slot holds, given
            the slot and their number.
    """

    def __init__(self, count: int, can_reuse: Callable[[int, int], bool]) -> None:
        self._cached = [array("i") for _ in range(count)]
        self._can_reuse = can_reuse
        self._adapters: list[str | None] = [None] * count  # that the keys and values depend on
        self._released_at = [0] * count
        self._clock = 0
        self.free = set(range(count))

    def place(self, prompt: Sequence[int], adapter: str | None = None) -> Placement:
        """Take a free slot for a prompt; the longest prefix of it that any slot holds is reused.

        A free slot that holds little else continues in place. Otherwise the prefix is copied to
        the slot that was released first, so that what the other slot holds stays. A prefix that
        another adapter computed has other keys and values, and is not reused.
        """
        wanted = np.array(prompt[:-1], np.int32)  # the last token is processed for its logits
        slot = max(self.free, key=lambda slot: self._common(slot, wanted, adapter))
        length = self._common(slot, wanted, adapter)
        source, longest = self._longest(wanted, adapter)
        if longest - length < MIN_COPY and 2 * length >= len(self._cached[slot]):
            placement = Placement(slot, slot, length)
        else:
            slot = min(self.free, key=lambda slot: (self._released_at[slot], slot))
            own = self._common(slot, wanted, adapter)
            is_copied = longest - own >= MIN_COPY
            placement = Placement(slot, *((source, longest) if is_copied else (slot, own)))
        self.free.discard(placement.slot)
        self._adapters[placement.slot] = adapter
        self.keep(placement.slot, prompt[: placement.length])
        return placement

    def longer_prefix(self, slot: int, prompt: Sequence[int]) -> Placement | None:
        """Return a prefix of a prompt that another slot holds by now, if it is worth a copy."""
        wanted = np.array(prompt[:-1], np.int32)
        source, longest = self._longest(wanted, self._adapters[slot])
        if longest - len(self._cached[slot]) < MIN_COPY:
            return None
        self.keep(slot, prompt[:longest])
        return Placement(slot, source, longest)

    def keep(self, slot: int, tokens: Iterable[int]) -> None:
        """Record all tokens that a slot holds."""
        self._cached[slot] = array("i", tokens)

    def extend(self, slot: int, tokens: Iterable[int]) -> None:
        """Record further tokens of a slot."""
        self._cached[slot].extend(tokens)

    def release(self, slot: int) -> None:
        """Free a slot; its tokens may be reused."""
        self._clock += 1
        self._released_at[slot] = self._clock
        self.free.add(slot)

    def _longest(self, wanted: np.ndarray, adapter: str | None) -> tuple[int, int]:
        """Return the slot that holds the longest prefix, and the length of it."""
        lengths = [self._common(slot, wanted, adapter) for slot in range(len(self._cached))]
        longest = max(lengths)
        return lengths.index(longest), longest

    def _common(self, slot: int, wanted: np.ndarray, adapter: str | None) -> int:
        """Return the number of tokens at the beginning that a slot and a prompt share.

        It is 0 if the engine cannot reuse all of them: of fewer, it has overwritten more.
        """
        if self._adapters[slot] != adapter:
            return 0
        held = np.frombuffer(self._cached[slot], np.int32) if self._cached[slot] else wanted[:0]
        count = min(len(held), len(wanted))
        differs = held[:count] != wanted[:count]
        common = int(differs.argmax()) if differs.any() else count
        return common if self._can_reuse(slot, common) else 0
