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
    if (in_documents := document_positions()) is not None:
        return in_documents
    if (cache_positions := kv_cache.cache_positions(length)) is not None:
        return cache_positions
    if ring := manual_axes_of("kv_seq"):
        chunk = jnp.arange(length // 2)
        return jnp.concatenate([chunk + len(chunk) * part for part in _chunks_of_device(ring)])
    devices = shards_of("kv_seq")
    if devices == 1:
        return jnp.arange(length)
    # axis_to_ring_order(arange) by arithmetic: each device computes its own, where a flip would
    # communicate.
    size, device = length // (2 * devices), jnp.arange(devices)[:, None]
    chunks = jnp.concatenate([device, 2 * devices - 1 - device], axis=1)
    return (size * chunks[..., None] + jnp.arange(size)).reshape(length)


def document_positions() -> jax.Array | None:
    """Return each token's position in its document (batch, seq), in the order of the tokens.

    Where a ring's mesh axes are manual, they are those of this device. Where documents are not
    isolated, return None.
    """
    whole = segment_positions()
    if whole is None:
        return None
    if ring := manual_axes_of("kv_seq"):
        length = whole.shape[1] // (2 * jax.lax.axis_size(ring))
        return jnp.concatenate(
            [
                jax.lax.dynamic_slice_in_dim(whole, length * part, length, 1)
                for part in _chunks_of_device(ring)
            ],
            1,
        )
    if not mesh_axes_of("kv_seq"):
        return whole
    return constrain(axis_to_ring_order(whole, 1), "batch", "seq")


def _chunks_of_device(ring: tuple[str, ...]) -> tuple[jax.Array, jax.Array]:
    """Return which of a sequence's chunks this device has, inside a shard_map over a ring."""
    index = jax.lax.axis_index(ring)
    return index, 2 * jax.lax.axis_size(ring) - 1 - index


def to_ring_order(batch: Tree) -> Tree:
    """Reorder a step's arrays (..., batch, seq) to ring order; without a ring, return them as is.

    Segment ids stay in the order of the sequence: every device needs those of all keys.

    Raises:
        ShardingError: the sequence length is not a multiple of what the order requires.
    """
    if not mesh_axes_of("kv_seq"):
        return batch
    return {name: x if name == "documents" else _order(x) for name, x in batch.items()}


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
