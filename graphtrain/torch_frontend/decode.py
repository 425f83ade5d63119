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
        specs |= {f"{_path(name)}/{one}": spec for one in ("key", "value")}
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
    before, after = flatten(cache), {}

    def of(name: str) -> dict[str, jax.Array]:
        return {one: before[f"{_path(name)}/{one}"] for one in ("key", "value")}

    def put(name: str, arrays: dict[str, jax.Array]) -> None:
        after.update({f"{_path(name)}/{one}": array for one, array in arrays.items()})

    @contextmanager
    def around(name: str) -> Iterator[None]:
        with use_cache(**of(name)) as here:
            yield
        put(name, {"key": here.key, "value": here.value})

    def leaving(scan: Scan) -> jax.Array:
        names = _positions(scan.stack)

        def row(hidden: jax.Array, each: Any) -> tuple[jax.Array, Any]:
            arrays, keys, kept = each
            found = []
            for position in range(len(names)):
                with use_cache(**kept[position]) as here:
                    hidden = scan.run_block(position, hidden, arrays[position], keys[position])
                found.append({"key": here.key, "value": here.value})
            return hidden, found

        assert scan.hidden is not None
        rows = scan.rows, scan.keys(), [of(name) for name in names]
        hidden, found = jax.lax.scan(row, scan.hidden, rows)
        for name, arrays in zip(names, found, strict=True):
            put(name, arrays)
        return hidden

    whole = _without_remat(opened)
    arrays = whole.cast_parameters(flatten(parameters))
    with at_cache_offset(offset):
        out = whole.run(arrays, tokens, None, ScanHooks(run_blocks=leaving, around_block=around))
        return whole.finish_logits(out, tokens), unflatten(after)


def _heads(opened: OpenedModel) -> dict[str, tuple[int, int]]:
    """Return the number of KV heads and head_dim by block, or by position of a stack's period."""
    found: dict[str, list[tuple[int, int]]] = {}

    @contextmanager
    def around(name: str) -> Iterator[None]:
        with record_cache_shapes() as here:
            yield
        found[name] = here.heads

    def leaving(scan: Scan) -> Any:
        for position, name in enumerate(_positions(scan.stack)):
            with around(name):
                scan.describe(position)
        return scan.hidden

    def run(arrays: dict[str, jax.Array], tokens: jax.Array) -> CacheShapeRecorder:
        whole, through = _without_remat(opened), ScanHooks(run_blocks=leaving, around_block=around)
        with record_cache_shapes() as outside:
            whole.run(whole.cast_parameters(arrays), tokens, None, through)
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
    described = sum(len(found[name]) for one in opened.stacks for name in _positions(one))
    if len(outside[0].heads) > described:
        raise ImportedModelError(
            "decoding with a KV cache requires all attention to be in blocks of a ModuleList, but "
            "this model calls attention outside of them"
        )
    for name, heads in found.items():
        if len(heads) != 1:
            raise ImportedModelError(
                "decoding with a KV cache requires one attention in each block that graphtrain "
                f"computes; {name} has {len(heads)}"
            )
    return {name: heads[0] for name, heads in found.items()}


def _positions(stack: Stack) -> list[str]:
    """Return the names of a stack's KV cache arrays, one for each position of its period."""
    return [f"{stack.name}.{position}" for position in range(stack.period)]


def _rows(opened: OpenedModel, name: str) -> int | None:
    """Return the number of rows of a stack's arrays; None for a block outside of stacks."""
    by_name = {one: stack.rows for stack in opened.stacks for one in _positions(stack)}
    return by_name.get(name)


def _path(name: str) -> str:
    return name.replace(".", "/")


def _without_remat(opened: OpenedModel) -> OpenedModel:
    """Return the model without activation checkpointing, as decoding has no backward pass."""
    return replace(opened, settings=replace(opened.settings, remat="none"))
