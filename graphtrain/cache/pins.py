"""Pins: programs that garbage collection never removes."""

from __future__ import annotations

from contextlib import suppress

from graphtrain.cache.layout import StorePaths, validate_digest
from graphtrain.cache.stored_requests import list_digests
from graphtrain.cache.writing import write_errors


def pin(layout: StorePaths, digest: str) -> None:
    """Exempt a program from garbage collection.

    Raises:
        CacheError: the cache is not writable.
    """
    path = layout.pins / validate_digest(digest)
    with write_errors(path, 0):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def unpin(layout: StorePaths, digest: str) -> None:
    """Remove the pin of a program, if it has one.

    Raises:
        CacheError: the cache is not writable.
    """
    path = layout.pins / validate_digest(digest)
    with write_errors(path, 0), suppress(FileNotFoundError):
        path.unlink()


def pinned(layout: StorePaths) -> frozenset[str]:
    """Return the digests of the pinned programs."""
    return frozenset(list_digests(layout.pins))
