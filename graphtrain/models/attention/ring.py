"""Ring attention: causal attention over sequences sharded by position (context parallelism).

Every device keeps its queries while keys and values travel around the ring: n steps for n devices,
and the keys and values of the next step are sent while a step computes. Scores exist for one tile
of queries and one chunk of keys at a time, and partial results of the softmax are merged by their
log-sum-exp (`models.tiles`). The backward pass goes around the ring once more and recomputes the
scores; the gradients of keys and values travel with them. What is saved for the backward pass is
linear in the sequence length.

Positions are in the zig-zag order of `ring_order`: of 2n chunks, device i holds a head, chunk i,
and a tail, chunk 2n - 1 - i. Of the four pairs of device i's query chunks with device j's key
chunks, the causal mask hides two completely and two not at all: the pair (tail, head) is always
visible, and in addition

- j < i: (head, head), because i > j;
- j > i: (tail, tail), because 2n - 1 - i > 2n - 1 - j.

So each step computes the pairs (tail, head) and (w, w), where w is head or tail: every device runs
the same program, with half the products of unmasked attention and no branch, because w only
selects where slices begin. The step on a device's own keys has a third pair, because there
(head, head) and (tail, tail) are both on the diagonal.

Source: Liu et al. 2023, "Ring attention", https://arxiv.org/abs/2310.01889
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import sequential_vmap
from jax.sharding import PartitionSpec

from graphtrain.models.attention.ring_blocks import (
    ChunkOffsets,
    PartialAttention,
    attend,
    chunk_keys,
    gradients,
    merge,
    tile_queries,
    unchunk_keys,
    untile_queries,
)
from graphtrain.models.attention.score_mods import ScoreTransform
from graphtrain.models.attention.segment_mask import Masks, segment_ids
from graphtrain.models.attention.sinks import add_sinks, by_group, sink_gradients
from graphtrain.models.projection import PROJECTION
from lowering.tracing.constrain import Placement, manual_axes, placement

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float

HEAD_CHUNK, TAIL_CHUNK = 0, 1  # indices of a device's two chunks, from either end of a sequence
Chunk = int | jax.Array


def ring_attention(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq kv_heads head_dim"],
    value: Float[Array, "batch seq kv_heads value_dim"],
    scoring: ScoreTransform,
    mesh_axes: tuple[str, ...],
    window: jax.Array | None = None,
    sinks: Float[Array, " heads"] | None = None,
) -> Float[Array, "batch seq heads value_dim"]:
    """Compute `dot_product_attention` of positions in ring order along these mesh axes.

    Args:
        query: Queries.
        key: Keys.
        value: Values.
        scoring: Transformation of query-key products into scores.
        mesh_axes: Mesh axes that shard the positions of keys, in ring order.
        window: Sliding window in positions; without it, a query sees all earlier keys.
        sinks: Logit of each query head's attention sink; without them, there are none.
    """
    context = placement()  # read now: the gradient may be traced outside of `placed`
    assert context is not None, "a ring needs a mesh"
    shard_mapped = partial(_shard_mapped, context, mesh_axes, scoring)
    seq_spec, chunk_spec = PartitionSpec(None, mesh_axes), PartitionSpec(mesh_axes)
    # The window is an array input, because it may differ between layers.
    layer, layer_spec = _LayerInputs(Masks(window, segment_ids()), sinks), PartitionSpec()

    @jax.custom_vjp
    def ring(query: jax.Array, key: jax.Array, value: jax.Array, layer: _LayerInputs) -> jax.Array:
        return forward(query, key, value, layer)[0]

    def forward(
        query: jax.Array, key: jax.Array, value: jax.Array, layer: _LayerInputs
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        in_specs = (*(seq_spec,) * 3, layer_spec)
        output, log_sum = shard_mapped(_forward, in_specs, (seq_spec, chunk_spec))(
            query, key, value, layer
        )
        # Saved by every remat policy that saves products with weights: to recompute it would
        # repeat all communication.
        output, log_sum = checkpoint_name(output, PROJECTION), checkpoint_name(log_sum, PROJECTION)
        return output, (query, key, value, output, log_sum, layer)

    def backward(residuals: tuple[Any, ...], gradient: jax.Array) -> tuple[Any, ...]:
        *arrays, layer = residuals
        in_specs = (*(seq_spec,) * 4, chunk_spec, seq_spec, layer_spec)
        out_specs = (*(seq_spec,) * 3, layer_spec)
        *grads, grad_sinks = shard_mapped(_backward, in_specs, out_specs)(*arrays, gradient, layer)
        return (*grads, _LayerInputs(Masks(None, None), grad_sinks))

    ring.defvjp(forward, backward)
    return ring(query, key, value, layer)


class _LayerInputs(NamedTuple):
    """Inputs besides queries, keys and values; the same on every device of the ring."""

    masks: Masks
    sinks: jax.Array | None  # logits of attention sinks (heads,)


def _shard_mapped(
    context: Placement,
    mesh_axes: tuple[str, ...],
    scoring: ScoreTransform,
    local: Callable,
    in_specs: tuple,
    out_specs: tuple,
) -> Callable:
    """Wrap `local`, which runs on one device's positions, into a function of global arrays.

    Only `mesh_axes` become manual inside; the rules shard along all other mesh axes. Inside a
    shard_map over them, the arrays already are one device's.
    """
    names = set(mesh_axes) - set(context.manual)
    ring = _Ring(mesh_axes, context.shape.size(mesh_axes), is_mapped_here=bool(names))

    def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        with manual_axes(names, context):
            return local(ring, scoring, *arrays)

    if not names:
        return sequential_vmap(run)
    mapped = jax.shard_map(
        run, mesh=context.current_mesh, in_specs=in_specs, out_specs=out_specs, axis_names=names
    )
    # sequential_vmap makes it one operation for JAX, which would otherwise hoist what does not
    # depend on the layer's input, such as masks as large as all scores, out of the loop over
    # layers and keep it in memory.
    return sequential_vmap(mapped)


@dataclass(frozen=True)
class _Ring:
    """Devices along mesh axes, inside a shard_map over them."""

    mesh_axes: tuple[str, ...]
    size: int
    is_mapped_here: bool  # else the caller is in the shard_map, and sums gradients of weights

    @property
    def index(self) -> jax.Array:
        """Index of this device in the ring."""
        return lax.axis_index(self.mesh_axes)

    def rotate(self, tree: Any) -> Any:
        """Send arrays to the next device; return those of the previous device."""
        pairs = [(device, (device + 1) % self.size) for device in range(self.size)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.mesh_axes, pairs), tree)

    def pairs(self, step: int | jax.Array, length: int) -> list[tuple[Chunk, Chunk, ChunkOffsets]]:
        """Return the pairs (query chunk, key chunk, their first positions) to compute in a step.

        Args:
            step: Number of times that the keys have been sent on; 0: the device's own keys.
            length: Positions in a chunk.
        """
        source = (self.index - step) % self.size
        if isinstance(step, int) and step == 0:
            chunks: list[tuple[Chunk, Chunk]] = [
                (HEAD_CHUNK, HEAD_CHUNK),
                (TAIL_CHUNK, TAIL_CHUNK),
                (TAIL_CHUNK, HEAD_CHUNK),
            ]
        else:
            same_end = jnp.where(source < self.index, HEAD_CHUNK, TAIL_CHUNK)
            chunks = [(TAIL_CHUNK, HEAD_CHUNK), (same_end, same_end)]

        def chunk_start(device: jax.Array, chunk: Chunk) -> jax.Array:
            return length * jnp.where(chunk == HEAD_CHUNK, device, 2 * self.size - 1 - device)

        return [
            (
                query_chunk,
                key_chunk,
                ChunkOffsets(chunk_start(self.index, query_chunk), chunk_start(source, key_chunk)),
            )
            for query_chunk, key_chunk in chunks
        ]


def _forward(
    ring: _Ring,
    scoring: ScoreTransform,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    layer: _LayerInputs,
) -> tuple[jax.Array, jax.Array]:
    """Return the attention output and the log-sum-exp of the scores.

    The output is (batch, seq, heads, head_dim), the log-sum-exp (chunk, tile, batch, kv_heads,
    query, group).
    """
    queries = tile_queries(query, key.shape[2])
    keys = chunk_keys(key), chunk_keys(value)
    length = query.shape[1] // 2

    def step(
        accumulated: PartialAttention, keys: Any, step_index: int | jax.Array
    ) -> PartialAttention:
        for query_chunk, key_chunk, pair in ring.pairs(step_index, length):
            partial_output = attend(
                _read_chunk(queries, query_chunk),
                _read_chunk(keys, key_chunk),
                pair,
                scoring,
                layer.masks,
            )
            accumulated = _write_chunk(
                accumulated,
                query_chunk,
                merge(_read_chunk(accumulated, query_chunk), partial_output),
            )
        return accumulated

    def step_and_send(
        carry: tuple[PartialAttention, Any], step_index: jax.Array
    ) -> tuple[Any, None]:
        accumulated, keys = carry
        return (step(accumulated, keys, step_index), ring.rotate(keys)), None

    start = step(PartialAttention.empty(queries, value.shape[3]), keys, 0), ring.rotate(keys)
    (accumulated, keys), _ = lax.scan(step_and_send, start, jnp.arange(1, ring.size - 1))
    output, log_sum = step(accumulated, keys, ring.size - 1)
    if layer.sinks is not None:
        output, log_sum = add_sinks(output, log_sum, by_group(layer.sinks, key.shape[2]))
    return untile_queries(output).astype(query.dtype), log_sum


def _backward(
    ring: _Ring,
    scoring: ScoreTransform,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    output: jax.Array,
    log_sum: jax.Array,
    gradient: jax.Array,
    layer: _LayerInputs,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Return the gradients of query, key, value and sinks."""
    kv_heads, length = key.shape[2], query.shape[1] // 2
    queries, incoming = tile_queries(query, kv_heads), tile_queries(gradient, kv_heads)
    products = incoming.astype(jnp.float32) * tile_queries(output, kv_heads)
    rows = queries, incoming, log_sum, products.sum(-1)
    keys = chunk_keys(key), chunk_keys(value)

    def step(
        grad_queries: Any, grad_keys: Any, keys: Any, step_index: int | jax.Array
    ) -> tuple[Any, Any]:
        for query_chunk, key_chunk, pair in ring.pairs(step_index, length):
            chunk_grads = gradients(
                _read_chunk(rows, query_chunk),
                _read_chunk(keys, key_chunk),
                pair,
                scoring,
                layer.masks,
            )
            grad_queries = _add_to_chunk(grad_queries, query_chunk, chunk_grads[0])
            grad_keys = _add_to_chunk(grad_keys, key_chunk, chunk_grads[1])
        return grad_queries, grad_keys

    def send_and_step(carry: tuple[Any, ...], step_index: jax.Array) -> tuple[Any, None]:
        grad_queries, grad_keys, keys = carry
        # Neither transfer depends on this step's products, so both overlap with them.
        next_keys, received_grads = ring.rotate(keys), ring.rotate(grad_keys)
        return (*step(grad_queries, received_grads, keys, step_index), next_keys), None

    zeros = jax.tree.map(lambda x: jnp.zeros_like(x, jnp.float32), (queries, keys))
    start = (*step(zeros[0], zeros[1], keys, 0), ring.rotate(keys))
    (grad_queries, grad_keys, keys), _ = lax.scan(
        send_and_step, start, jnp.arange(1, ring.size - 1)
    )
    grad_queries, grad_keys = step(grad_queries, ring.rotate(grad_keys), keys, ring.size - 1)
    grad_key, grad_value = (unchunk_keys(grad) for grad in ring.rotate(grad_keys))  # to their owner
    return (
        untile_queries(grad_queries).astype(query.dtype),
        grad_key.astype(key.dtype),
        grad_value.astype(value.dtype),
        _sink_gradients(ring, rows, layer.sinks, kv_heads),
    )


def _sink_gradients(
    ring: _Ring, rows: tuple[jax.Array, ...], sinks: jax.Array | None, kv_heads: int
) -> jax.Array | None:
    """Return the gradients of the sinks (heads,); None without sinks.

    They are summed over the ring, unless the shard_map is the caller's, who sums them.
    """
    if sinks is None:
        return None
    _, _, log_sum, mean = rows
    by_query = sink_gradients(log_sum, mean, by_group(sinks, kv_heads))
    total = by_query.sum((0, 1, 2, 4)).reshape(sinks.shape).astype(sinks.dtype)
    return lax.psum(total, ring.mesh_axes) if ring.is_mapped_here else total


# Slices along the first axis: XLA's partitioner crashes on scatters inside a shard_map (jax 0.11).


def _read_chunk(tree: Any, chunk: Chunk) -> Any:
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, chunk, 0, keepdims=False), tree)


def _write_chunk(tree: Any, chunk: Chunk, new: Any) -> Any:
    return jax.tree.map(lambda x, y: lax.dynamic_update_index_in_dim(x, y, chunk, 0), tree, new)


def _add_to_chunk(tree: Any, chunk: Chunk, added: Any) -> Any:
    return _write_chunk(tree, chunk, jax.tree.map(jnp.add, _read_chunk(tree, chunk), added))
