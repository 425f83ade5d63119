"""Collectives of activations, of all kinds of parallelism, by arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.cost_model.passes import Passes
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
from graphtrain.models.mlp_block_count import mlp_block_count
from lowering.hlo.collectives import Collective


def activation_collectives(program: ResolvedProgram) -> Iterator[Collective]:
    """Yield the collectives of activations, of all kinds of parallelism."""
    sizes, passes = DeviceSizes.of(program), Passes.of(program)
    yield from _of_layers(program, sizes, passes)
    if program.model.dense_layers:
        yield from _of_dense_layers(program, sizes, passes)
    if passes.ahead:
        yield from _of_ahead(program, sizes, passes)
    yield from _of_vocabulary(program, sizes, passes)
    yield from _of_inputs(program, sizes, passes)
    yield from _of_stages(program, sizes, passes)


def _of_layers(
    program: ResolvedProgram, sizes: DeviceSizes, passes: Passes
) -> Iterator[Collective]:
    """Yield those of as many passes of a layer as `passes` says."""
    yield from _of_partial_sums(program, sizes, passes)
    yield from _of_attention(program, sizes, passes)
    yield from _of_repeated_attention(program, sizes, passes)
    yield from _of_experts(program, sizes, passes)


def _of_dense_layers(
    program: ResolvedProgram, sizes: DeviceSizes, passes: Passes
) -> Iterator[Collective]:
    """Yield those of the dense layers before a mixture's.

    In a pipeline they follow the embedding, which a stage computes for its share of all
    microbatches at once, before the first tick.
    """
    sizes = replace(sizes, sequences=sizes.sequences * passes.embedded)
    passes = replace(
        passes,
        layers=program.model.dense_layers * passes.embeddings,
        recomputes_stage=False,
        recomputes_layers=False,
    )
    yield from _of_partial_sums(program, sizes, passes, "dense_mlp")
    yield from _of_attention(program, sizes, passes)
    yield from _of_repeated_attention(program, sizes, passes)


def _sum_dtype(program: ResolvedProgram) -> tuple[int, str]:
    """Return bytes and dtype of partial sums; see graphtrain/models/matmul.py."""
    narrow = program.target.platform in ("cuda", "rocm", "tpu")
    return activation_dtype(program) if narrow else (4, "f32")


def _of_ahead(program: ResolvedProgram, sizes: DeviceSizes, passes: Passes) -> Iterator[Collective]:
    """Yield those of multi-token prediction: a block like a layer, an embedding and an LM head.

    Its projection reads all positions of hidden states and embeddings, and its gradient those of
    the result; the gradient of the hidden states is gathered too.
    """
    count = passes.ahead
    again = replace(passes, layers=count, embeddings=count, heads=count)
    yield from _of_layers(program, sizes, again)
    yield from _of_vocabulary(program, sizes, again)
    axes = splitting_axes(program.rules.activations, ("residual",), program.mesh)
    item, dtype = activation_dtype(program)
    size = sizes.sequences * sizes.seq_in_block * program.model.embed * item
    yield collective("all-gather", axes, 4 * count, size, mesh=program.mesh, dtype=dtype)


def _of_partial_sums(
    program: ResolvedProgram, sizes: DeviceSizes, passes: Passes, mlp_axis: str = "mlp"
) -> Iterator[Collective]:
    """Yield the sums over devices that split heads or the MLP, and gathers of positions."""
    model, mesh, table = program.model, program.mesh, program.rules.activations
    times = passes.layers
    stream = sizes.sequences * sizes.seq_in_block * model.embed
    item, dtype = activation_dtype(program)
    sum_item, sum_dtype = _sum_dtype(program)
    heads = splitting_axes(table, ("heads",), mesh)
    mlp = splitting_axes(table, (mlp_axis,), mesh)
    again = max((model.remat == "full") + passes.recomputes_layers, passes.recomputes_stage)
    # The gradients of a layer's input, from each matrix that reads it, are one sum on GPUs.
    apart = program.target.platform == "cpu"
    counts = (
        (heads, 2 + again + 2 * apart, 3 + _gathers_input_again(program)),
        (mlp, 2 + passes.recomputes_layers + (apart and is_gated(model)), 3),
    )
    for axes, count, gathers in counts:
        scattered = bool(set(axes) & set(splitting_axes(table, ("residual",), mesh)))
        op = reduce_scatter(program) if scattered else "all-reduce"
        size = stream * sum_item
        yield collective(op, axes, times * count, size, mesh=mesh, dtype=sum_dtype)
        if scattered:
            count, size = gathers * times, stream * item
            yield collective("all-gather", axes, count, size, mesh=mesh, dtype=dtype)


def _gathers_input_again(program: ResolvedProgram) -> bool:
    """Return whether attention's backward pass gathers its input again; see models/block.py."""
    is_plain = program.model.latent_attention is None
    return program.target.is_gpu and is_plain and mlp_block_count(program) > 1


def _of_vocabulary(
    program: ResolvedProgram, sizes: DeviceSizes, passes: Passes
) -> Iterator[Collective]:
    """Yield the collectives of a split vocabulary: embedding, LM head and loss."""
    mesh, table = program.mesh, program.rules.activations
    vocab = splitting_axes(table, ("vocab",), mesh)
    positions = sizes.sequences * sizes.seq_in_block
    embedded = passes.embedded * positions * program.model.embed
    scored = passes.scored * positions * program.model.embed
    item, dtype = activation_dtype(program)
    sum_item, _ = _sum_dtype(program)
    over_vocab = partial(collective, axes=vocab, mesh=mesh)
    yield over_vocab("all-reduce", count=passes.embeddings, size=embedded * item, dtype=dtype)
    scattered = bool(set(vocab) & set(splitting_axes(table, ("residual",), mesh)))
    op = reduce_scatter(program) if scattered else "all-reduce"
    yield over_vocab(op, count=passes.heads, size=scored * sum_item, dtype=dtype)  # of hidden
    if scattered:
        yield over_vocab("all-gather", count=passes.heads, size=scored * item, dtype=dtype)
        yield over_vocab("all-gather", count=passes.embeddings, size=embedded * item, dtype=dtype)
    # Maximum, sum of exponentials, and the target's logit, each of the positions whose float32
    # logits exist at once.
    sums = 3 * passes.heads
    scored_positions = passes.scored * sizes.seq_in_block
    parts = round(scored_positions / sizes.scored_positions) if sizes.in_chunks else 1
    size = 4 * sizes.sequences * scored_positions / parts
    yield over_vocab("all-reduce", count=sums * parts, size=size, dtype="f32")


def _of_attention(
    program: ResolvedProgram, sizes: DeviceSizes, passes: Passes
) -> Iterator[Collective]:
    """Yield the collectives of ring attention and of Ulysses (heads exchanged for positions)."""
    model, mesh, table = program.model, program.mesh, program.rules.activations
    assert model.head_dim and model.kv_heads
    item, dtype = activation_dtype(program)
    times, again = passes.layers, passes.recomputes_layers
    ring = splitting_axes(table, ("kv_seq",), mesh)
    pair = 2 * sizes.sequences * sizes.kv_positions * sizes.kv_heads * model.head_dim
    over_ring, hops = partial(collective, axes=ring, mesh=mesh), max(0, mesh.size(ring) - 1)
    yield over_ring(
        "collective-permute", count=(2 + again) * hops * times, size=pair * item, dtype=dtype
    )
    ring_size = mesh.size(ring)  # gradients of keys and values go around the complete ring
    yield over_ring("collective-permute", count=ring_size * times, size=pair * 4, dtype="f32")
    exchanged = splitting_axes(table, ("attention_heads",), mesh)
    token = sizes.sequences * sizes.seq_in_block * model.head_dim * item
    query = token * sizes.heads * mesh.size(exchanged)
    # Key heads are repeated where they are fewer than devices.
    local_kv_heads = model.kv_heads // mesh.size(splitting_axes(table, ("kv_heads",), mesh))
    key = token * math.lcm(local_kv_heads, mesh.size(exchanged))
    count = 2 * (2 + recomputes(program) + again) * times  # of query and output, or key and value
    exchange = partial(collective, "all-to-all", exchanged, count, mesh=mesh, dtype=dtype)
    yield exchange(query)
    yield exchange(key)


def _of_inputs(
    program: ResolvedProgram, sizes: DeviceSizes, passes: Passes
) -> Iterator[Collective]:
    """Yield the gathers of tokens, targets, weights and segment ids over positions.

    A pipeline gathers the segment ids of all microbatches at once. With Ulysses, XLA gathers those
    of a microbatch for positions and for the mask.
    """
    mesh, table, count = program.mesh, program.rules.activations, program.batch.microbatches
    ids, ring = (
        4 * sizes.sequences * program.batch.seq_len,
        splitting_axes(table, ("kv_seq",), mesh),
    )
    # Tokens, targets and weights are put into the order of the ring.
    yield collective("all-gather", ring, 1, 3 * ids * count, mesh=mesh, dtype="s32")
    if program.batch.cross_document_attention:
        return
    if passes.ticks:
        count, ids = 1, ids * count
    elif not ring:
        count *= 2
    along = splitting_axes(table, ("seq",), mesh)
    yield collective("all-gather", along, count, ids, mesh=mesh, dtype="s32")


def _of_repeated_attention(
    program: ResolvedProgram, sizes: DeviceSizes, passes: Passes
) -> Iterator[Collective]:
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
    yield collective("all-reduce", axes, passes.layers, size, mesh=mesh, dtype=dtype)


def _of_experts(
    program: ResolvedProgram, sizes: DeviceSizes, passes: Passes
) -> Iterator[Collective]:
    """Yield the collectives that send tokens to their experts and back, forward and backward."""
    model, mesh = program.model, program.mesh
    if model.moe is None:
        return
    item, dtype = activation_dtype(program)
    times = passes.layers
    experts = splitting_axes(program.rules.activations, ("experts",), mesh)
    stream = sizes.sequences * sizes.seq_in_block * model.embed
    over_experts = partial(collective, axes=experts, mesh=mesh)
    count = 2 + recomputes(program) + passes.recomputes_layers
    tokens = splitting_axes(program.rules.activations, ("batch", "experts"), mesh)
    if program.target.platform == "cpu":  # XLA for CPUs does not partition a top-k
        scores = 4 * sizes.sequences * sizes.seq_in_block * model.moe.experts * mesh.size(tokens)
        yield collective("all-gather", tokens, (count - 1) * times, scores, mesh=mesh, dtype="f32")
    if (capacity := model.moe.capacity_factor) is not None:
        sent = stream * model.moe.experts_per_token * capacity * item
        yield over_experts("all-to-all", count=(2 + 2 * count) * times, size=sent, dtype=dtype)
        if program.target.platform != "cpu":
            # The gradient of the tokens that an expert took is added up on every device.
            taken = stream * item * mesh.size(tokens)
            yield collective("all-gather", tokens, times, taken, mesh=mesh, dtype=dtype)
        return
    shared = stream * mesh.size(experts)
    yield over_experts("all-gather", count=count * times, size=shared * item, dtype=dtype)
    # The experts' results are summed in float32, and the gradients of the gathered tokens.
    sums = (1 + passes.recomputes_layers) * times
    yield over_experts("reduce-scatter", count=sums, size=shared * 4, dtype="f32")
    yield over_experts("reduce-scatter", count=times, size=shared * item, dtype=dtype)


def _of_stages(
    program: ResolvedProgram, sizes: DeviceSizes, passes: Passes
) -> Iterator[Collective]:
    """Yield what pipeline stages pass on; 1F1B also divides the positions of the loss.

    Each tick passes on activations, and backward again. A column of the queue moves for each
    microbatch, and while the last result is on the way; with 1F1B once for both directions.
    """
    mesh, ticks, microbatches = program.mesh, passes.ticks, program.batch.microbatches
    stages = mesh.size(("stage",))
    item, dtype = activation_dtype(program)
    residual = sizes.sequences * sizes.seq_residual * program.model.embed * item
    over_stages = partial(
        collective, axes=("stage",) if ticks else (), size=residual, mesh=mesh, dtype=dtype
    )
    if program.pipeline.schedule != "1f1b":
        yield over_stages("collective-permute", count=2 * (ticks + microbatches + stages))
        return
    on_the_way = 2 * stages - (program.pipeline.virtual_stages == 1)
    yield over_stages("collective-permute", count=2 * ticks + microbatches + on_the_way)
    yield over_stages("all-gather", count=microbatches)
    yield over_stages("all-to-all", count=microbatches)
