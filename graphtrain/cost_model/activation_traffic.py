"""Collectives of activations, of all kinds of parallelism, by arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.cost_model.predicted_collective import (
    activation_dtype,
    collective,
    recomputes,
    reduce_scatter,
    splitting_axes,
)
from graphtrain.cost_model.sizes import DeviceSizes
from graphtrain.models.attention.kernel_support import step_uses_flash_kernel
from graphtrain.models.flops import is_gated
from lowering.hlo.collectives import Collective


def activation_collectives(program: ResolvedProgram) -> Iterator[Collective]:
    """Yield the collectives of activations, of all kinds of parallelism."""
    sizes = DeviceSizes.of(program)
    yield from _of_partial_sums(program, sizes)
    yield from _of_vocabulary(program, sizes)
    yield from _of_attention(program, sizes)
    yield from _of_repeated_attention(program, sizes)
    yield from _of_experts(program, sizes)
    yield from _of_stages(program, sizes)


def _sum_dtype(program: ResolvedProgram) -> tuple[int, str]:
    """Return bytes and dtype of partial sums; see graphtrain/models/matmul.py."""
    narrow = program.target.platform in ("cuda", "rocm", "tpu")
    return activation_dtype(program) if narrow else (4, "f32")


def _of_partial_sums(program: ResolvedProgram, sizes: DeviceSizes) -> Iterator[Collective]:
    """Yield the sums over devices that split heads or the MLP, and gathers of positions."""
    model, mesh, table = program.model, program.mesh, program.rules.activations
    times = round(sizes.layers) * program.batch.microbatches
    stream = sizes.sequences * sizes.seq_in_block * model.embed
    item, dtype = activation_dtype(program)
    sum_item, sum_dtype = _sum_dtype(program)
    heads = splitting_axes(table, ("heads",), mesh)
    mlp = splitting_axes(table, ("mlp",), mesh)
    again = model.remat == "full"
    # The gradients of a layer's input, from each matrix that reads it, are one sum on GPUs.
    apart = program.target.platform == "cpu"
    counts = (
        (heads, 2 + again + 2 * apart),
        (mlp, 2 + (apart and is_gated(model))),
    )
    for axes, count in counts:
        scattered = bool(set(axes) & set(splitting_axes(table, ("residual",), mesh)))
        op = reduce_scatter(program) if scattered else "all-reduce"
        size = stream * sum_item
        yield collective(op, axes, times * count, size, mesh=mesh, dtype=sum_dtype)
        if scattered:
            yield collective("all-gather", axes, 3 * times, stream * item, mesh=mesh, dtype=dtype)


def _of_vocabulary(program: ResolvedProgram, sizes: DeviceSizes) -> Iterator[Collective]:
    """Yield the collectives of a split vocabulary: embedding, LM head and loss."""
    mesh, table, batch = program.mesh, program.rules.activations, program.batch
    vocab = splitting_axes(table, ("vocab",), mesh)
    positions = sizes.sequences * sizes.seq_in_block
    stream = positions * program.model.embed
    item, dtype = activation_dtype(program)
    sum_item, _ = _sum_dtype(program)
    over_vocab = partial(collective, axes=vocab, mesh=mesh)
    times = batch.microbatches
    yield over_vocab("all-reduce", count=times, size=stream * item, dtype=dtype)  # embedding
    scattered = bool(set(vocab) & set(splitting_axes(table, ("residual",), mesh)))
    op = reduce_scatter(program) if scattered else "all-reduce"
    yield over_vocab(op, count=times, size=stream * sum_item, dtype=dtype)  # gradient of hidden
    if scattered:
        yield over_vocab("all-gather", count=2 * times, size=stream * item, dtype=dtype)
    # Maximum, sum of exponentials, and the target's logit.
    yield over_vocab("all-reduce", count=3 * times, size=positions * 4, dtype="f32")


def _of_attention(program: ResolvedProgram, sizes: DeviceSizes) -> Iterator[Collective]:
    """Yield the collectives of ring attention and of Ulysses (heads exchanged for positions)."""
    model, mesh, table = program.model, program.mesh, program.rules.activations
    assert model.head_dim and model.kv_heads
    item, dtype = activation_dtype(program)
    times = round(sizes.layers) * program.batch.microbatches
    ring = splitting_axes(table, ("kv_seq",), mesh)
    pair = 2 * sizes.sequences * sizes.kv_positions * sizes.kv_heads * model.head_dim
    over_ring, hops = partial(collective, axes=ring, mesh=mesh), max(0, mesh.size(ring) - 1)
    yield over_ring("collective-permute", count=2 * hops * times, size=pair * item, dtype=dtype)
    ring_size = mesh.size(ring)  # gradients of keys and values go around the complete ring
    yield over_ring("collective-permute", count=ring_size * times, size=pair * 4, dtype="f32")
    # Tokens, targets and weights are put into the order of the ring.
    inputs = 3 * 4 * sizes.sequences * program.batch.seq_len * program.batch.microbatches
    yield over_ring("all-gather", count=1, size=inputs, dtype="s32")
    exchanged = splitting_axes(table, ("attention_heads",), mesh)
    token = sizes.sequences * sizes.seq_in_block * model.head_dim * item
    query = token * sizes.heads * mesh.size(exchanged)
    # Key heads are repeated where they are fewer than devices.
    local_kv_heads = model.kv_heads // mesh.size(splitting_axes(table, ("kv_heads",), mesh))
    key = token * math.lcm(local_kv_heads, mesh.size(exchanged))
    passes = 2 * (2 + recomputes(program))  # over query and output, or over key and value
    exchange = partial(collective, "all-to-all", exchanged, passes * times, mesh=mesh, dtype=dtype)
    yield exchange(query)
    yield exchange(key)


def _of_repeated_attention(program: ResolvedProgram, sizes: DeviceSizes) -> Iterator[Collective]:
    """Yield the sum of the gradients of a kernel's inputs over devices that repeat the kernel.

    A kernel is mapped over devices by jax.shard_map, which sums the gradients of replicated inputs.
    """
    if program.target.platform != "cuda" or not step_uses_flash_kernel(program):
        return
    mesh, table = program.mesh, program.rules.activations
    dividing = ("batch", "seq", "q_seq", "heads", "attention_heads", "stages")
    splitting = splitting_axes(table, dividing, mesh)
    axes = [name for name, size in mesh.axes.items() if size > 1 and name not in splitting]
    item, dtype = activation_dtype(program)
    heads = sizes.heads + 2 * sizes.kv_heads
    size = sizes.sequences * sizes.seq_in_block * heads * sizes.head_dim * item
    times = round(sizes.layers) * program.batch.microbatches
    yield collective("all-reduce", axes, times, size, mesh=mesh, dtype=dtype)


def _of_experts(program: ResolvedProgram, sizes: DeviceSizes) -> Iterator[Collective]:
    """Yield the collectives that send tokens to their experts and back, forward and backward."""
    model, mesh = program.model, program.mesh
    if model.moe is None:
        return
    item, dtype = activation_dtype(program)
    times = round(sizes.layers) * program.batch.microbatches
    experts = splitting_axes(program.rules.activations, ("experts",), mesh)
    stream = sizes.sequences * sizes.seq_in_block * model.embed
    over_experts = partial(collective, axes=experts, mesh=mesh)
    passes = 2 + recomputes(program)
    if (capacity := model.moe.capacity_factor) is not None:
        sent = stream * model.moe.experts_per_token * capacity * item
        yield over_experts("all-to-all", count=(2 + 2 * passes) * times, size=sent, dtype=dtype)
        # The gradient of the tokens that an expert took is added up on every device.
        tokens = splitting_axes(program.rules.activations, ("batch", "experts"), mesh)
        taken = stream * item * mesh.size(tokens)
        yield collective("all-gather", tokens, times, taken, mesh=mesh, dtype=dtype)
        return
    shared = stream * mesh.size(experts)
    yield over_experts("all-gather", count=passes * times, size=shared * item, dtype=dtype)
    yield over_experts("reduce-scatter", count=passes * times, size=shared * item, dtype=dtype)


def _of_stages(program: ResolvedProgram, sizes: DeviceSizes) -> Iterator[Collective]:
    """Yield what pipeline stages pass on; 1F1B also divides the positions of the loss."""
    mesh, batch, stages = program.mesh, program.batch, program.mesh.axes.get("stage", 1)
    item, dtype = activation_dtype(program)
    residual = sizes.sequences * sizes.seq_residual * program.model.embed * item
    over_stages = partial(
        collective, axes=("stage",) if stages > 1 else (), size=residual, mesh=mesh, dtype=dtype
    )
    ticks = batch.microbatches * program.pipeline.virtual_stages + stages - 1
    yield over_stages("collective-permute", count=2 * ticks)
    if program.pipeline.schedule == "1f1b":
        ticks = batch.microbatches + 2 * (stages - 1)
        yield over_stages("all-gather", count=ticks)
        yield over_stages("all-to-all", count=ticks)
