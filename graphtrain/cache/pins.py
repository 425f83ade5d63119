"""Programs that garbage collection leaves alone."""

from __future__ import annotations

from contextlib import suppress

from graphtrain.cache.layout import Layout, checked
from graphtrain.cache.requests import digests
from graphtrain.cache.writing import writing


def pin(layout: Layout, digest: str) -> None:
    """Keep a program, whatever limits gc is given.

    Raises:
        CacheError: the store cannot be written.
    """
    path = layout.pins / checked(digest)
    with writing(path, 0):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def unpin(layout: Layout, digest: str) -> None:
    """Let it go again."""
    path = layout.pins / checked(digest)
    with writing(path, 0), suppress(FileNotFoundError):
        path.unlink()


def pinned(layout: Layout) -> frozenset[str]:
    """Digests of programs."""
    return frozenset(digests(layout.pins))
