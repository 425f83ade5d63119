"""Tokens that continue a sequence: keys and values of those before are kept, not computed again.

A step says once where its tokens begin; positions and attention ask here, so that nothing between
them carries it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from lowering.tracing.context import scoped


@dataclass
class Kept:
    """Keys and values of one layer: (batch, longest, kv_heads, head_dim)."""

    key: jax.Array
    value: jax.Array

    def add(self, key: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Put those of the tokens at hand in their places; returns all."""
        begin = _begin.get()
        assert begin is not None
        for name, added in (("key", key), ("value", value)):
            whole = getattr(self, name)
            placed = jax.lax.dynamic_update_slice_in_dim(whole, added.astype(whole.dtype), begin, 1)
            setattr(self, name, placed)
        return self.key, self.value


@dataclass
class Wanted:
    """In place of Kept, to find out what there is to keep."""

    heads: list[tuple[int, int]] = field(default_factory=list)  # of keys, and their width

    def add(self, key: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Note what is added; returns it."""
        self.heads.append((key.shape[2], key.shape[3]))
        return key, value


_begin: ContextVar[jax.Array | None] = ContextVar("begin", default=None)
_kept: ContextVar[Kept | Wanted | None] = ContextVar("kept", default=None)


def begins() -> jax.Array | None:
    """The position of the first token; None where sequences are whole."""
    return _begin.get()


def places(length: int) -> jax.Array | None:
    """The positions of so many tokens, int32 (length,); None where sequences are whole."""
    begin = _begin.get()
    return None if begin is None else begin + jnp.arange(length)


def kept() -> Kept | Wanted | None:
    """What is kept of the layer at hand; None where sequences are whole."""
    return _kept.get()


def beginning(begin: jax.Array) -> AbstractContextManager[Any]:
    """The tokens of what is traced inside begin at a position."""
    return scoped(_begin, begin)


def keeping(key: jax.Array, value: jax.Array) -> AbstractContextManager[Any]:
    """The attention traced inside sees what is kept, the Kept that this gives, and adds to it."""
    return scoped(_kept, Kept(key, value))


def wanting() -> AbstractContextManager[Any]:
    """The attention traced inside tells what it would add, to the Wanted that this gives."""
    return scoped(_kept, Wanted())
