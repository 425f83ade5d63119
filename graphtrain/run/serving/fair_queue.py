"""Queue in which requests take turns, however many sequences each of them has."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

Owner = TypeVar("Owner", bound=Hashable)
Item = TypeVar("Item")


class FairQueue(Generic[Owner, Item]):
    """First in, first out; a request with several sequences waits again after each of them."""

    def __init__(self) -> None:
        self._items: dict[Owner, deque[Item]] = {}  # in the order of their turns

    def __len__(self) -> int:
        return sum(map(len, self._items.values()))

    def push(self, owner: Owner, item: Item) -> None:
        self._items.setdefault(owner, deque()).append(item)

    def pop(self) -> Item:
        """Return the next item; its owner goes to the end of the queue with the others."""
        owner = next(iter(self._items))
        items = self._items.pop(owner)
        item = items.popleft()
        if items:
            self._items[owner] = items
        return item

    def remove(self, owner: Owner) -> None:
        """Remove all items of an owner."""
        self._items.pop(owner, None)
