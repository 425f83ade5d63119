"""Attention of one new token over a KV cache by JAX's kernels of paged attention.

A kernel reads the keys that a sequence has, not the whole cache. The slot of a sequence is a run of
pages, so the page table follows from the slot. Each device calls the kernel for its own sequences
and heads, since compilers do not partition a kernel.

Source: Kwon et al. 2023, "PagedAttention", https://arxiv.org/abs/2309.06180
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from graphtrain.models.attention.kv_cache import (
    CacheRows,
    LayerCache,
    cache_partition,
)
from graphtrain.models.attention.score_mods import ScoreTransform
from lowering.tracing.constrain import mesh_axes_of, on_each_device, shards_of

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int

# Positions of a page, of which the layout's block is a multiple; not tuned.
_GPU_PAGE, _TPU_PAGE = 64, 128
_GPU_SPLITS = 16  # parts of a sequence that a GPU processes in parallel, at most


def paged_attention(
    cache: LayerCache,
    query: Float[Array, "batch 1 heads head_dim"],
    rows: CacheRows,
    scoring: ScoreTransform,
    platform: str,
    interpret: bool = False,
) -> Float[Array, "batch 1 heads head_dim"]:
    """Return the attention of one new token of each row to its sequence, the token included.

    Args:
        cache: KV cache of the layer, with the new tokens; its layout has pages.
        query: Queries, with rotary embedding applied.
        rows: Slots and offsets of the batch.
        scoring: Scale and soft cap of scores.
        platform: "tpu" or "cuda".
        interpret: Run the kernel without its device, for tests.
    """
    by_slot = PartitionSpec(mesh_axes_of("batch") or None)
    by_head = PartitionSpec(*by_slot, mesh_axes_of("heads") or None)
    cached = cache_partition(cache.key, rows.layout.key)
    attend = on_each_device(
        partial(_KERNELS[platform], cap=scoring.cap, interpret=interpret),
        (by_head, cached, cached, by_slot, None if rows.slot is None else PartitionSpec()),
        by_head,
    )
    scaled = (query[:, 0].astype(jnp.float32) * scoring.scale).astype(query.dtype)
    return attend(scaled, cache.key, cache.value, rows.offset + 1, rows.slot)[:, None]


def heads_match(kv_heads: int) -> bool:
    """Return whether the query heads of a device are those of its KV heads."""
    return kv_heads == 1 or shards_of("kv_heads") == shards_of("heads")


def _gpu_kernel(
    query: Float[Array, "batch heads head_dim"],
    keys: Float[Array, "kv_heads slots length head_dim"],
    values: Float[Array, "kv_heads slots length head_dim"],
    lengths: Int[Array, " batch"],
    slot: Int[Array, ""] | None,
    cap: float | None,
    interpret: bool,
) -> Float[Array, "batch heads head_dim"]:
    from jax.experimental.pallas.ops.gpu import paged_attention as gpu

    table = _page_table(keys, _GPU_PAGE, len(query), slot)
    return gpu.paged_attention(
        query,
        _pages(keys, _GPU_PAGE),
        _pages(values, _GPU_PAGE),
        table,
        lengths,
        pages_per_compute_block=1,
        k_splits=max(n for n in range(1, _GPU_SPLITS + 1) if table.shape[1] % n == 0),
        attn_logits_soft_cap=cap,
        interpret=interpret,
    )


def _tpu_kernel(
    query: Float[Array, "batch heads head_dim"],
    keys: Float[Array, "kv_heads slots length head_dim"],
    values: Float[Array, "kv_heads slots length head_dim"],
    lengths: Int[Array, " batch"],
    slot: Int[Array, ""] | None,
    cap: float | None,
    interpret: bool,
) -> Float[Array, "batch heads head_dim"]:
    from jax.experimental.pallas.ops.tpu import paged_attention as tpu

    assert not interpret, "JAX's kernel for TPUs has no interpreted form"
    return tpu.paged_attention(
        query,
        _pages(keys, _TPU_PAGE),
        _pages(values, _TPU_PAGE),
        lengths,
        _page_table(keys, _TPU_PAGE, len(query), slot),
        pages_per_compute_block=4,
        attn_logits_soft_cap=cap,
    )


_KERNELS = {"cuda": _gpu_kernel, "tpu": _tpu_kernel}


def _pages(cache: jax.Array, page: int) -> Float[Array, "kv_heads pages page head_dim"]:
    return cache.reshape(cache.shape[0], -1, page, cache.shape[3])


def _page_table(
    cache: jax.Array, page: int, batch: int, slot: jax.Array | None
) -> Int[Array, "batch pages"]:
    count = cache.shape[2] // page
    first = jnp.arange(batch, dtype=jnp.int32) if slot is None else slot[None]
    return first[:, None] * count + jnp.arange(count, dtype=jnp.int32)
