"""KV cache of the layer being traced: tokens continue a sequence whose keys and values are cached.

A step sets the cache offset once. Position encodings and attention read it from this context, so
that no code in between passes it on.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from lowering.tracing.context import set_context_variable


@dataclass
class LayerCache:
    """KV cache of one layer: keys and values, each (batch, longest, kv_heads, head_dim)."""

    key: jax.Array
    value: jax.Array

    def update(self, key: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Write the new tokens' keys and values at the cache offset; return all of the cache.

        `key` and `value` are (batch, seq, kv_heads, head_dim).
        """
        begin = _offset.get()
        assert begin is not None
        for name, added in (("key", key), ("value", value)):
            cached = getattr(self, name)
            updated = jax.lax.dynamic_update_slice_in_dim(
                cached, added.astype(cached.dtype), begin, 1
            )
            setattr(self, name, updated)
        return self.key, self.value


@dataclass
class CacheShapeRecorder:
    """Recorder with the interface of LayerCache, to find the shapes that a KV cache needs."""

    heads: list[tuple[int, int]] = field(default_factory=list)  # (kv_heads, head_dim) of each call

    def update(self, key: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Record the shape of key; return key and value unchanged."""
        self.heads.append((key.shape[2], key.shape[3]))
        return key, value


_offset: ContextVar[jax.Array | None] = ContextVar("offset", default=None)
_layer_cache: ContextVar[LayerCache | CacheShapeRecorder | None] = ContextVar(
    "layer_cache", default=None
)


def cache_offset() -> jax.Array | None:
    """Return the cache offset, the position of the first token; None without a KV cache."""
    return _offset.get()


def cache_positions(length: int) -> jax.Array | None:
    """Return the positions of `length` new tokens, int32 (length,); None without a KV cache."""
    begin = _offset.get()
    return None if begin is None else begin + jnp.arange(length)


def layer_cache() -> LayerCache | CacheShapeRecorder | None:
    """Return the KV cache of the layer being traced; None without a KV cache."""
    return _layer_cache.get()


def cached_length() -> int | None:
    """Return the number of tokens that the KV cache has room for; None without a KV cache."""
    cache = _layer_cache.get()
    return cache.key.shape[1] if isinstance(cache, LayerCache) else None


def at_cache_offset(offset: jax.Array) -> AbstractContextManager[Any]:
    """Set the cache offset, the position of the first token, for the code traced inside."""
    return set_context_variable(_offset, offset)


def use_cache(key: jax.Array, value: jax.Array) -> AbstractContextManager[Any]:
    """Let attention traced inside use and update a KV cache, the LayerCache that this yields."""
    return set_context_variable(_layer_cache, LayerCache(key, value))


def record_cache_shapes() -> AbstractContextManager[Any]:
    """Record the KV cache shapes of attention traced inside, in the recorder that this yields."""
    return set_context_variable(_layer_cache, CacheShapeRecorder())
