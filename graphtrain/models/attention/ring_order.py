"""Order in which a step computes the positions of a sequence (zig-zag context parallelism).

With ring attention, each device holds two chunks of every sequence, one from either end: of 2n
chunks, device i of n holds chunks i and 2n - 1 - i, so that the causal mask leaves every device the
same work. Tokens, targets and loss weights are reordered once, at the beginning of a step. The sum
of losses does not depend on the order; code that depends on positions calls `positions`.

Source: Brandon et al. 2023, "Striped attention", https://arxiv.org/abs/2311.09431, for the problem;
Grattafiori et al. 2024, "Llama 3", section 3.3.2, https://arxiv.org/abs/2407.21783, for this order
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from graphtrain.models.attention import kv_cache
from graphtrain.models.attention.segment_mask import segment_positions
from lowering.tracing.constrain import constrain, manual_axes_of, mesh_axes_of, shards_of
from lowering.trees import Tree
from sharding_rules.errors import ShardingError


def ring_axes() -> tuple[str, ...]:
    """Return the mesh axes that split the keys of a sequence; empty without ring attention.

    A pipeline makes them manual: the arrays are then this device's part of the sequence.
    """
    return mesh_axes_of("kv_seq") or manual_axes_of("kv_seq")


def positions(length: int) -> jax.Array:
    """Return the position of each element of a sequence, int32 (length,).

    Where documents are isolated, return positions in the document, (batch, length). With a KV
    cache, positions start at the offset of each row, (batch, length). Where a ring's mesh axes are
    manual, `length` and the result are this device's.
    """
    if (document_positions := segment_positions()) is not None:
        return document_positions
    if (cache_positions := kv_cache.cache_positions(length)) is not None:
        return cache_positions
    if ring := manual_axes_of("kv_seq"):
        index, devices = jax.lax.axis_index(ring), jax.lax.axis_size(ring)
        chunk = jnp.arange(length // 2)
        ends = (chunk + len(chunk) * part for part in (index, 2 * devices - 1 - index))
        return jnp.concatenate([*ends])
    devices = shards_of("kv_seq")
    if devices == 1:
        return jnp.arange(length)
    # axis_to_ring_order(arange) by arithmetic: each device computes its own, where a flip would
    # communicate.
    size, device = length // (2 * devices), jnp.arange(devices)[:, None]
    chunks = jnp.concatenate([device, 2 * devices - 1 - device], axis=1)
    return (size * chunks[..., None] + jnp.arange(size)).reshape(length)


def to_ring_order(batch: Tree) -> Tree:
    """Reorder a step's arrays (..., batch, seq) to ring order; without a ring, return them as is.

    Raises:
        ShardingError: documents are isolated, or the sequence length is not a multiple of what the
            order requires.
    """
    if not mesh_axes_of("kv_seq"):
        return batch
    if "documents" in batch:
        raise ShardingError(
            "batch.cross_document_attention = false is not supported with ring attention (the "
            "rules context); "
            "use rules that keep the keys of a sequence on one device"
        )
    return jax.tree.map(_order, batch)


def _order(x: jax.Array) -> jax.Array:
    axes = ("microbatch", "batch", "seq")[-x.ndim :]
    gathered = constrain(x, *axes[:-1], None)  # small: gather, do not exchange chunks
    return constrain(axis_to_ring_order(gathered, x.ndim - 1), *axes)


def axis_to_ring_order(x: jax.Array, axis: int) -> jax.Array:
    """Reorder an axis of positions to ring order; without a ring, return x unchanged.

    Raises:
        ShardingError: the positions do not divide into two chunks for each device of the ring.
    """
    devices = shards_of("kv_seq")
    if devices == 1:
        return x
    length = x.shape[axis]
    if length % (2 * devices):
        raise ShardingError(
            f"ring attention divides sequences into 2 chunks for each of the {devices} devices "
            f"along {' x '.join(mesh_axes_of('kv_seq'))}, which {length} positions do not; use a "
            f"sequence length that is a multiple of {2 * devices}"
        )
    ends = x.reshape(*x.shape[:axis], 2, devices, length // (2 * devices), *x.shape[axis + 1 :])
    head_chunks, tail_chunks = (
        jax.lax.index_in_dim(ends, end, axis, keepdims=False) for end in (0, 1)
    )
    return jnp.stack([head_chunks, jnp.flip(tail_chunks, axis)], axis + 1).reshape(x.shape)
