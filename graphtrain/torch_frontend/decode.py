"""Decoding with an imported model: a KV cache for its blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from graphtrain.errors import ImportedModelError
from graphtrain.models.attention.cache_layout import CachedLayer
from graphtrain.models.attention.kv_cache import (
    CacheRows,
    CacheShapeRecorder,
    continue_rows,
    record_cache_shapes,
    use_cache,
)
from graphtrain.torch_frontend.block_ranges import range_name
from graphtrain.torch_frontend.blocks import Stack
from graphtrain.torch_frontend.model import OpenedModel
from graphtrain.torch_frontend.scan import Scan, ScanHooks
from lowering.trees import Tree, flatten, unflatten

if TYPE_CHECKING:
    from graphtrain.models.protocol import LogitsReader

_TOKENS = (1, 4)  # (batch, seq) of the trace that finds the shapes of the KV cache


def cached_layers(opened: OpenedModel) -> dict[str, CachedLayer]:
    """Return the blocks whose keys and values are cached, by path.

    Raises:
        ImportedModelError: a block does not call graphtrain's attention exactly once, or attention
            is called outside of the blocks.
    """
    rows = {name: stack.rows for stack in opened.stacks for name in _positions(stack)}
    layers = {}
    for name, layer in _layers_by_block(opened).items():
        paths = [_path(name)] if name not in rows else _row_paths(name, rows[name])
        layers |= dict.fromkeys(paths, layer)
    return layers


def decode_step(
    opened: OpenedModel,
    parameters: Tree,
    cache: Tree,
    tokens: jax.Array,
    cache_rows: CacheRows,
    last: jax.Array | None = None,
    read: LogitsReader | None = None,
) -> tuple[Any, Tree]:
    """Run one decode step; return float32 logits (batch, seq, vocab) and the updated KV cache.

    Blocks are written out, not scanned: a scan would copy the weights and the cache of each block.

    Args:
        opened: the model.
        parameters: its weights, those of stacked blocks as tuples of arrays.
        cache: KV cache of the previous tokens: {"key", "value"} at the paths of cached_layers.
        tokens: the next token ids, (batch, seq).
        cache_rows: slots and offsets of the batch.
        last: index of the only token whose logits are returned, a scalar.
        read: returns what is returned in place of the logits.
    """
    cached_arrays, updated_arrays = flatten(cache), {}

    @contextmanager
    def cached_block(path: str) -> Iterator[None]:
        arrays = {entry: cached_arrays[f"{path}/{entry}"] for entry in ("key", "value")}
        with use_cache(**arrays) as layer_cache:
            yield
        updated_arrays[f"{path}/key"] = layer_cache.key
        updated_arrays[f"{path}/value"] = layer_cache.value

    def run_blocks(scan: Scan) -> jax.Array:
        assert scan.hidden is not None
        hidden, keys = scan.hidden, scan.keys()
        names = _positions(scan.stack)
        for row in range(scan.stack.rows):
            for position, name in enumerate(names):
                arrays = {path: array[row] for path, array in scan.rows[position].items()}
                with cached_block(_row_paths(name, scan.stack.rows)[row]):
                    hidden = scan.run_block(position, hidden, arrays, keys[row, position])
        return hidden

    model = _without_remat(opened)
    # XLA reads a row of a stack of its arguments from the argument.
    stacked = jax.tree.map(
        lambda rows: jnp.stack(rows) if isinstance(rows, tuple) else rows,
        parameters,
        is_leaf=lambda node: isinstance(node, tuple),
    )
    arrays = model.cast_parameters(flatten(stacked))
    with continue_rows(cache_rows):
        hooks = ScanHooks(
            run_blocks=run_blocks, around_block=lambda name: cached_block(_path(name))
        )
        logits = model.finish_logits(model.run(arrays, tokens, None, hooks), tokens)
    if read is not None:
        computed = logits  # a module returns those of all tokens
        value = read(lambda indices: jnp.take_along_axis(computed, indices[..., None], 1))
        return value, unflatten(updated_arrays)
    if last is not None:
        logits = jax.lax.dynamic_slice_in_dim(logits, last, 1, 1)
    return logits, unflatten(updated_arrays)


def _layers_by_block(opened: OpenedModel) -> dict[str, CachedLayer]:
    """Return what is cached by block, or by position of a stack's period."""
    found: dict[str, list[CachedLayer]] = {}

    @contextmanager
    def recorded_block(name: str) -> Iterator[None]:
        if name in found:
            raise ImportedModelError(
                f"{name} is called several times for each token, and its calls would share one KV "
                "cache; the model can be trained, but it cannot generate"
            )
        with record_cache_shapes() as recorder:
            yield
        found[name] = recorder.layers

    def run_blocks(scan: Scan) -> Any:
        for position, name in enumerate(_positions(scan.stack)):
            with recorded_block(name):
                scan.describe(position)
        return scan.hidden

    def run(arrays: dict[str, jax.Array], tokens: jax.Array) -> CacheShapeRecorder:
        model, through = (
            _without_remat(opened),
            ScanHooks(run_blocks=run_blocks, around_block=recorded_block),
        )
        with record_cache_shapes() as outside:
            model.run(model.cast_parameters(arrays), tokens, None, through)
        return outside

    specs = {
        path: jax.ShapeDtypeStruct(spec.shape, spec.dtype) for path, spec in opened.specs().items()
    }
    outside: list[CacheShapeRecorder] = []
    jax.eval_shape(
        lambda arrays, tokens: outside.append(run(arrays, tokens)),
        specs,
        jax.ShapeDtypeStruct(_TOKENS, jnp.int32),
    )
    in_stacks = (name for stack in opened.stacks for name in _positions(stack))
    block_calls = sum(len(found.get(name, ())) for name in in_stacks)  # a tower is not called
    if len(outside[0].layers) > block_calls:
        raise ImportedModelError(
            "decoding with a KV cache requires all attention to be in a ModuleList of at least two "
            "like blocks, but this model calls attention outside of one"
        )
    for name, layers in found.items():
        if len(layers) != 1:
            raise ImportedModelError(
                "decoding with a KV cache requires one attention in each block that graphtrain "
                f"computes; {name} has {len(layers)}. A module that computes attention by itself "
                "can be trained, but it cannot generate"
            )
    return {name: layers[0] for name, layers in found.items()}


def _positions(stack: Stack) -> list[str]:
    """Return the names of a stack's KV caches, one for each position of its period."""
    if stack.is_whole:
        return [f"{stack.name}.{position}" for position in range(stack.period)]
    return [f"{stack.name}.{range_name(stack.blocks_at(p))}" for p in range(stack.period)]


def _row_paths(name: str, rows: int) -> list[str]:
    """Return the paths of the caches of a stack's blocks at one position of its period."""
    return [f"{_path(name)}/{row:03}" for row in range(rows)]


def _path(name: str) -> str:
    return name.replace(".", "/")


def _without_remat(opened: OpenedModel) -> OpenedModel:
    """Return the model without activation checkpointing, as decoding has no backward pass."""
    return replace(opened, settings=replace(opened.settings, remat="none"))
