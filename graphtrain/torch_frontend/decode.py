"""Decoding with an imported model: a KV cache for its blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from graphtrain.errors import ImportedModelError
from graphtrain.models.attention.kv_cache import (
    CacheShapeRecorder,
    at_cache_offset,
    record_cache_shapes,
    use_cache,
)
from graphtrain.torch_frontend.blocks import Stack
from graphtrain.torch_frontend.model import OpenedModel
from graphtrain.torch_frontend.scan_blocks import Scan, ScanHooks
from lowering.trees import Tree, flatten, unflatten
from sharding_rules.arrays import ArraySpec

_TOKENS = (1, 4)  # (batch, seq) of the trace that finds the shapes of the KV cache


def kv_cache_specs(opened: OpenedModel, sequences: int, max_seq_len: int) -> Tree:
    """Return the specs of the model's KV cache, by block.

    Blocks of a stack share arrays with a leading layer axis, one pair for each position of its
    period.

    Args:
        opened: the model.
        sequences: number of sequences.
        max_seq_len: maximum number of tokens in a sequence.

    Raises:
        ImportedModelError: a block does not call graphtrain's attention exactly once, or attention
            is called outside of the blocks.
    """
    specs = {}
    for name, (kv_heads, head_dim) in _heads(opened).items():
        shape: tuple[int, ...] = (sequences, max_seq_len, kv_heads, head_dim)
        by_head = "kv_heads" if kv_heads > 1 else None
        axes: tuple[str | None, ...] = ("batch", None, by_head, "head_dim")
        if (rows := _rows(opened, name)) is not None:
            shape, axes = (rows, *shape), ("layers", *axes)
        spec = ArraySpec(shape, axes, opened.settings.dtype, "activation")
        specs |= {f"{_path(name)}/{entry}": spec for entry in ("key", "value")}
    return unflatten(specs)


def decode_step(
    opened: OpenedModel, parameters: Tree, cache: Tree, tokens: jax.Array, offset: jax.Array
) -> tuple[jax.Array, Tree]:
    """Run one decode step; return float32 logits (batch, seq, vocab) and the updated KV cache.

    Args:
        opened: the model.
        parameters: its weights.
        cache: KV cache of the previous tokens, as described by kv_cache_specs.
        tokens: the next token ids, (batch, seq).
        offset: cache offset, the position of the first of these tokens.
    """
    cached_arrays, updated_arrays = flatten(cache), {}

    def load_cache(name: str) -> dict[str, jax.Array]:
        return {entry: cached_arrays[f"{_path(name)}/{entry}"] for entry in ("key", "value")}

    def store_cache(name: str, arrays: dict[str, jax.Array]) -> None:
        updated_arrays.update({f"{_path(name)}/{entry}": array for entry, array in arrays.items()})

    @contextmanager
    def cached_block(name: str) -> Iterator[None]:
        with use_cache(**load_cache(name)) as layer_cache:
            yield
        store_cache(name, {"key": layer_cache.key, "value": layer_cache.value})

    def run_blocks(scan: Scan) -> jax.Array:
        names = _positions(scan.stack)

        def scan_row(hidden: jax.Array, row_inputs: Any) -> tuple[jax.Array, Any]:
            arrays, keys, row_caches = row_inputs
            updated_caches = []
            for position in range(len(names)):
                with use_cache(**row_caches[position]) as layer_cache:
                    hidden = scan.run_block(position, hidden, arrays[position], keys[position])
                updated_caches.append({"key": layer_cache.key, "value": layer_cache.value})
            return hidden, updated_caches

        assert scan.hidden is not None
        rows = scan.rows, scan.keys(), [load_cache(name) for name in names]
        hidden, stacked_caches = jax.lax.scan(scan_row, scan.hidden, rows)
        for name, arrays in zip(names, stacked_caches, strict=True):
            store_cache(name, arrays)
        return hidden

    model = _without_remat(opened)
    arrays = model.cast_parameters(flatten(parameters))
    with at_cache_offset(offset):
        out = model.run(
            arrays, tokens, None, ScanHooks(run_blocks=run_blocks, around_block=cached_block)
        )
        return model.finish_logits(out, tokens), unflatten(updated_arrays)


def _heads(opened: OpenedModel) -> dict[str, tuple[int, int]]:
    """Return the number of KV heads and head_dim by block, or by position of a stack's period."""
    heads_by_block: dict[str, list[tuple[int, int]]] = {}

    @contextmanager
    def recorded_block(name: str) -> Iterator[None]:
        with record_cache_shapes() as recorder:
            yield
        heads_by_block[name] = recorder.heads

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
    block_calls = sum(
        len(heads_by_block[name]) for stack in opened.stacks for name in _positions(stack)
    )
    if len(outside[0].heads) > block_calls:
        raise ImportedModelError(
            "decoding with a KV cache requires all attention to be in blocks of a ModuleList, but "
            "this model calls attention outside of them"
        )
    for name, heads in heads_by_block.items():
        if len(heads) != 1:
            raise ImportedModelError(
                "decoding with a KV cache requires one attention in each block that graphtrain "
                f"computes; {name} has {len(heads)}"
            )
    return {name: heads[0] for name, heads in heads_by_block.items()}


def _positions(stack: Stack) -> list[str]:
    """Return the names of a stack's KV cache arrays, one for each position of its period."""
    return [f"{stack.name}.{position}" for position in range(stack.period)]


def _rows(opened: OpenedModel, name: str) -> int | None:
    """Return the number of rows of a stack's arrays; None for a block outside of stacks."""
    by_name = {
        position_name: stack.rows for stack in opened.stacks for position_name in _positions(stack)
    }
    return by_name.get(name)


def _path(name: str) -> str:
    return name.replace(".", "/")


def _without_remat(opened: OpenedModel) -> OpenedModel:
    """Return the model without activation checkpointing, as decoding has no backward pass."""
    return replace(opened, settings=replace(opened.settings, remat="none"))
