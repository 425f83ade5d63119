"""KV cache of the layer being traced: tokens continue sequences whose keys and values are cached.

The cache has slots, one for each sequence. A step sets once which slots its rows continue, and at
which offsets; position encodings and attention read it from this context, so that no code in
between passes it on.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from graphtrain.models.attention.cache_layout import (
    DOT_LAYOUT,
    CachedLayer,
    CacheLayout,
    CacheSize,
    is_rolling,
)
from lowering.tracing.constrain import mesh_axes_of, on_each_device
from lowering.tracing.context import set_context_variable
from sharding_rules.arrays import ArraySpec


@dataclass(frozen=True)
class PackedTokens:
    """Places of the tokens of rows that have many texts each; arrays are int32 (batch, length).

    Attributes:
        position: Position in its text, after the prefix that all texts share.
        text: Number of its text.
        branch: 0 for the trunk of its text, else the number of the branch after it.
    """

    position: jax.Array
    text: jax.Array
    branch: jax.Array


@dataclass(frozen=True)
class CacheRows:
    """Slots and offsets of the rows of a batch.

    Attributes:
        offset: Position of each row's first new token, int32 (batch,).
        context_length: Number of tokens that a sequence may have.
        slot: Slot of the only row, an int32 scalar; None: row i is in slot i, and there are as many
            rows as slots.
        layout: Layout of the KV cache.
        packed: Tokens of many texts in each row, which continue the prefix before `offset` and are
            not cached; None: each row has one text.
    """

    offset: jax.Array
    context_length: int
    slot: jax.Array | None = None
    layout: CacheLayout = DOT_LAYOUT
    packed: PackedTokens | None = None

    def positions(self, length: int) -> jax.Array:
        """Return the positions of `length` new tokens, int32 (batch, length)."""
        if self.packed is not None:
            return self.packed.position
        return self.offset[:, None] + jnp.arange(length)

    def block(self, cache: jax.Array, begin: jax.Array, size: int, dims: str) -> jax.Array:
        """Return keys or values at the places `begin` to `begin + size`, for the rows.

        Args:
            cache: Keys or values of all slots.
            begin: First place.
            size: Number of places.
            dims: Dimensions of `cache`.
        """
        slots, positions = dims.index("b"), dims.index("k")
        if self.slot is None and size == cache.shape[positions]:
            return cache
        start, sizes = [jnp.int32(0)] * 4, list(cache.shape)
        start[positions], sizes[positions] = begin, size
        if self.slot is not None:
            start[slots], sizes[slots] = self.slot, 1
        return jax.lax.dynamic_slice(cache, start, sizes)


@dataclass
class LayerCache:
    """KV cache of one layer; the dimensions of its arrays are those of the layout of CacheRows."""

    key: jax.Array
    value: jax.Array

    def update(self, key: jax.Array, value: jax.Array) -> None:
        """Write the keys and values of new tokens, (batch, seq, kv_heads, head_dim)."""
        rows = cache_rows()
        assert rows is not None
        self.key = _write(self.key, key, rows, rows.layout.key)
        self.value = _write(self.value, value, rows, rows.layout.value)


@dataclass
class CacheShapeRecorder:
    """Recorder in place of a LayerCache, to find the KV caches that a model needs."""

    layers: list[CachedLayer] = field(default_factory=list)  # of each call of attention

    def record(self, key: jax.Array, window: int | None) -> None:
        """Record keys (batch, seq, kv_heads, head_dim) and the sliding window over them."""
        self.layers.append(CachedLayer(key.shape[2], key.shape[3], window))


_rows: ContextVar[CacheRows | None] = ContextVar("rows", default=None)
_layer_cache: ContextVar[LayerCache | CacheShapeRecorder | None] = ContextVar(
    "layer_cache", default=None
)


def _write(cache: jax.Array, added: jax.Array, rows: CacheRows, dims: str) -> jax.Array:
    """Return a cache, with dimensions in the order of `dims`, with the arrays of new tokens."""
    added = added.transpose(["bkhd".index(dim) for dim in dims]).astype(cache.dtype)
    length, positions = (array.shape[dims.index("k")] for array in (added, cache))
    begin = rows.offset
    if is_rolling(positions, rows.context_length):
        begin = begin % positions
        if length > 1:  # one token is at one place
            if rows.slot is None:
                return _loop(cache, added, begin, dims, _write_around_end)
            return _write_around_end(cache, added, rows.slot, begin[0], dims)
    if rows.slot is not None:
        return _write_slot(cache, added, rows.slot, begin[0], dims)
    return _WRITERS[rows.layout.writes](cache, added, begin, dims)


def _write_slot(
    cache: jax.Array, added: jax.Array, slot: jax.Array, offset: jax.Array, dims: str
) -> jax.Array:
    return jax.lax.dynamic_update_slice(cache, added, _indices(dims, slot, offset))


def _indices(dims: str, slot: jax.Array | int, position: jax.Array | int) -> list[jax.Array]:
    """Return the indices at which the arrays of a slot begin from a position on."""
    indices = [jnp.int32(0)] * 4
    indices[dims.index("b")], indices[dims.index("k")] = jnp.int32(slot), jnp.int32(position)
    return indices


def _write_around_end(
    cache: jax.Array, added: jax.Array, slot: jax.Array, begin: jax.Array, dims: str
) -> jax.Array:
    """Write the tokens of one slot into a rolling buffer, from `begin` to its end and around it.

    Two slices as long as the new tokens are written: the last that has its place before the end,
    and the first of the buffer. What other positions hold there is written back.
    """
    axis = dims.index("k")
    length, positions = added.shape[axis], cache.shape[axis]
    padding = [(length, length) if dim == "k" else (0, 0) for dim in dims]
    padded = jnp.pad(added, padding)
    counted = jnp.arange(length).reshape([-1 if dim == "k" else 1 for dim in dims])
    last_place = jnp.minimum(begin, positions - length)
    # Where a slice is, and the new token that its first position has: before the first, or beyond
    # the last, there is none.
    for place, token in (
        (last_place, last_place - begin),
        (jnp.int32(0), jnp.minimum(positions - begin, length)),
    ):
        new = jax.lax.dynamic_slice_in_dim(padded, length + token, length, axis)
        old = jax.lax.dynamic_slice(cache, _indices(dims, slot, place), added.shape)
        is_new = (counted + token >= 0) & (counted + token < length)
        cache = _write_slot(cache, jnp.where(is_new, new, old), slot, place, dims)
    return cache


def _write_rows(cache: jax.Array, added: jax.Array, offsets: jax.Array, dims: str) -> jax.Array:
    assert dims[0] == "b"
    update = partial(jax.lax.dynamic_update_slice_in_dim, axis=dims.index("k") - 1)
    return jax.vmap(update)(cache, added, offsets)


def _scatter(cache: jax.Array, added: jax.Array, offsets: jax.Array, dims: str) -> jax.Array:
    assert dims == "hbkd"
    positions = offsets[:, None] + jnp.arange(added.shape[2])
    slots = jnp.arange(len(offsets))[:, None]
    return cache.at[:, slots, positions].set(
        added, unique_indices=True, indices_are_sorted=True, mode="promise_in_bounds"
    )


def _loop(
    cache: jax.Array,
    added: jax.Array,
    offsets: jax.Array,
    dims: str,
    write_slot: Callable[..., jax.Array] = _write_slot,
) -> jax.Array:
    """Write slot by slot, by `write_slot`, on each device those that it has."""

    def write_slots(cache: jax.Array, added: jax.Array, offsets: jax.Array) -> jax.Array:
        def write(slot: jax.Array, cache: jax.Array) -> jax.Array:
            row = jax.lax.dynamic_slice_in_dim(added, slot, 1, dims.index("b"))
            return write_slot(cache, row, slot, offsets[slot], dims)

        return jax.lax.fori_loop(0, len(offsets), write, cache)

    cached, by_slot = cache_partition(cache, dims), PartitionSpec(mesh_axes_of("batch") or None)
    return on_each_device(write_slots, (cached, cached, by_slot), cached)(cache, added, offsets)


_WRITERS = {"rows": _write_rows, "scatter": _scatter, "loop": _loop}


def cache_partition(cache: jax.Array, dims: str) -> PartitionSpec:
    """Return how the devices share a cache whose dimensions are in the order of `dims`."""
    heads = mesh_axes_of("kv_heads") if cache.shape[dims.index("h")] > 1 else ()
    axes = {"b": mesh_axes_of("batch") or None, "h": heads or None}
    return PartitionSpec(*(axes.get(dim) for dim in dims))


def layer_cache_specs(
    layer: CachedLayer, slots: int, size: CacheSize, dtype: str
) -> dict[str, ArraySpec]:
    """Return the ArraySpecs of one layer's cache for sequences in a number of slots."""
    heads, layout = layer.kv_heads, size.layout
    sizes = {"b": slots, "h": heads, "k": size.positions(layer.window)}
    widths = {"key": layer.head_dim, "value": layer.value_dim or layer.head_dim}
    axes = {"b": "batch", "h": "kv_heads" if heads > 1 else None, "k": None, "d": "head_dim"}
    return {
        name: ArraySpec(
            tuple((sizes | {"d": widths[name]})[dim] for dim in dims),
            tuple(axes[dim] for dim in dims),
            dtype,
            "activation",
        )
        for name, dims in (("key", layout.key), ("value", layout.value))
    }


def cache_rows() -> CacheRows | None:
    """Return the slots and offsets of the batch; None without a KV cache."""
    return _rows.get()


def cache_positions(length: int) -> jax.Array | None:
    """Return the positions of new tokens, int32 (batch, length); None without a KV cache."""
    rows = _rows.get()
    return None if rows is None else rows.positions(length)


def layer_cache() -> LayerCache | CacheShapeRecorder | None:
    """Return the KV cache of the layer being traced; None without a KV cache."""
    return _layer_cache.get()


def context_length() -> int | None:
    """Return the number of tokens that a sequence may have; None without a KV cache."""
    rows = _rows.get()
    return None if rows is None else rows.context_length


def continue_rows(rows: CacheRows) -> AbstractContextManager[Any]:
    """Set the slots and offsets of the batch for the code traced inside."""
    return set_context_variable(_rows, rows)


def use_cache(key: jax.Array, value: jax.Array) -> AbstractContextManager[Any]:
    """Let attention traced inside use and update a KV cache, the LayerCache that this yields."""
    return set_context_variable(_layer_cache, LayerCache(key, value))


def record_cache_shapes() -> AbstractContextManager[Any]:
    """Record the KV cache shapes of attention traced inside, in the recorder that this yields."""
    return set_context_variable(_layer_cache, CacheShapeRecorder())
