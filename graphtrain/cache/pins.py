"""Pins: programs that garbage collection never removes."""

from __future__ import annotations

from contextlib import suppress

from graphtrain.cache.layout import Layout, checked
from graphtrain.cache.requests import digests
from graphtrain.cache.writing import writing


def pin(layout: Layout, digest: str) -> None:
    """Exempt a program from garbage collection.

    Raises:
        CacheError: the cache is not writable.
    """
    path = layout.pins / checked(digest)
    with writing(path, 0):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def unpin(layout: Layout, digest: str) -> None:
    """Remove the pin of a program, if it has one.

    Raises:
        CacheError: the cache is not writable.
    """
    path = layout.pins / checked(digest)
    with writing(path, 0), suppress(FileNotFoundError):
        path.unlink()


def pinned(layout: Layout) -> frozenset[str]:
    """Return the digests of the pinned programs."""
    return frozenset(digests(layout.pins))
