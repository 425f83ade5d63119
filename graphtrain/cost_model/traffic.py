"""Collectives of a training step, predicted by arithmetic from the sharding rules."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.cost_model.sizes import DeviceSizes
from graphtrain.cost_model.weights import ShardedWeight, shard_weights
from lowering.hlo.collectives import Collective
from sharding_rules.axes import MESH_AXES
from sharding_rules.mesh import MeshShape
from sharding_rules.pipeline import bubble_fraction


def predict_collectives(
    program: ResolvedProgram, weights: Sequence[ShardedWeight] | None = None
) -> tuple[Collective, ...]:
    """Predict the collectives of a training step, without those of negligible size.

    Args:
        program: the program.
        weights: result of shard_weights, if the caller has it.
    """
    if weights is None:
        weights = shard_weights(program)
    collectives = [*_of_weights(program, weights), *_of_activations(program)]
    return tuple(
        collective
        for collective in collectives
        if collective.devices > 1 and collective.bytes and collective.count
    )


def bubble_of(program: ResolvedProgram) -> float:
    """Return the fraction of a pipeline's ticks in which a stage is idle."""
    pipeline, stages = program.pipeline, program.mesh.axes.get("stage", 1)
    return bubble_fraction(
        pipeline.schedule, stages, pipeline.virtual_stages, program.batch.microbatches
    )


def _of_weights(program: ResolvedProgram, weights: Sequence[ShardedWeight]) -> Iterator[Collective]:
    """Yield the collectives that gather weights for use and reduce gradients to their shards."""
    batch, mesh = program.batch, program.mesh
    token_axes = _axes(program.rules.activations, ("batch", "seq"), mesh)
    width, dtype = (2, "bf16") if program.model.dtype == "bfloat16" else (4, "f32")
    rows = _looked_up_rows(program)
    deferred = batch.gradient_reduction == "per_step" and "data" in token_axes
    # XLA for GPUs moves an all-reduce out of the accumulation loop. It gathers the head once, and
    # also, by an option in lowering/xla/backend.py, what a layer's backward pass uses twice.
    on_gpu = program.target.platform == "cuda"
    for weight in weights:
        if weight.elements_per_layer < 1e5:
            continue  # norms and biases
        layers = weight.spec.shape[0] // mesh.axes.get("stage", 1) if weight.in_layers else 1
        gathered = tuple(axis for axis in weight.stored if axis not in (*weight.in_use, "stage"))
        used_elements = weight.used_of_a_layer(mesh)
        times = layers * batch.microbatches
        at_once = on_gpu and not weight.in_layers
        uses = 1 if weight.path.startswith("embedding") or at_once else 2
        if program.loss.kind == "dpo" and weight.frozen:
            uses = 1 if program.adapter is None else uses + 1  # DPO's reference model
        if program.model.remat == "full" and weight.in_layers and weight.path[-4:] != "down":
            uses += not on_gpu  # recomputation gathers weights again
        yield _collective(
            "all-gather", gathered, times * uses, used_elements * width, mesh=mesh, dtype=dtype
        )
        if weight.frozen:
            continue
        yield _gradient_reduction(weight, gathered, times, used_elements * 4, rows, mesh)
        shard_elements = used_elements / mesh.size(gathered)
        optimizer_axes = weight.optimizer
        for axis in (name for name in token_axes if name not in gathered):
            reductions = layers if axis == "data" and deferred else times
            if axis in optimizer_axes and not deferred:
                yield _gradient_reduction(
                    weight, (axis,), reductions, shard_elements * 4, rows, mesh
                )
            elif axis in optimizer_axes:
                yield _collective(
                    "reduce-scatter",
                    (axis,),
                    reductions,
                    shard_elements * 4,
                    mesh=mesh,
                    dtype="f32",
                )
            else:
                count = layers if on_gpu and not weight.in_layers else reductions
                yield _collective(
                    "all-reduce", (axis,), count, shard_elements * 4, mesh=mesh, dtype="f32"
                )
        regathered_axes = tuple(axis for axis in weight.optimizer if axis not in weight.stored)
        yield _collective(
            "all-gather", regathered_axes, 1, shard_elements * layers * 4, mesh=mesh, dtype="f32"
        )


def _looked_up_rows(program: ResolvedProgram) -> tuple[float, str]:
    """Return bytes and dtype of the gradients of the embedding rows that a device looks up.

    TPU programs convert them to float32 before they send them.
    """
    sizes = DeviceSizes.of(program)
    numbers = sizes.sequences * sizes.seq_residual * program.model.embed
    wide = program.target.platform == "tpu" or sizes.item_bytes == 4
    return (numbers * 4, "f32") if wide else (numbers * 2, "bf16")


def _gradient_reduction(
    weight: ShardedWeight,
    axes: tuple[str, ...],
    count: int,
    size: float,
    rows: tuple[float, str],
    mesh: MeshShape,
) -> Collective:
    """Return the collective that reduces a gradient to its shards.

    An embedding's gradient is summed where its shard is, if the gradients of the looked-up rows are
    fewer bytes to send there.
    """
    looked_up, dtype = rows
    if weight.path.startswith("embedding") and looked_up < size:
        return _collective("all-to-all", axes, count, looked_up, mesh=mesh, dtype=dtype)
    return _collective("reduce-scatter", axes, count, size, mesh=mesh, dtype="f32")


def _of_activations(program: ResolvedProgram) -> Iterator[Collective]:
    """Yield the collectives of activations, of all kinds of parallelism."""
    model, batch, mesh = program.model, program.batch, program.mesh
    sizes, use = DeviceSizes.of(program), program.rules.activations
    times = round(sizes.layers) * batch.microbatches
    stream = sizes.sequences * sizes.seq_in_block * model.embed
    summed = tuple(axis for axis in _axes(use, ("heads", "mlp"), mesh))
    residual_axes = [axis for axis in _axes(use, ("residual",), mesh) if axis in summed]
    recomputations = 1 if model.remat == "full" else 0
    on_chip = program.target.platform in ("cuda", "rocm", "tpu")
    reduced = (
        sizes.item_bytes if on_chip else 4
    )  # the dtype of partial sums in graphtrain/models/matmul.py
    bf16_collective = partial(_collective, mesh=mesh, dtype="bf16")
    partial_sum_collective = partial(
        _collective, mesh=mesh, dtype="bf16" if reduced == 2 else "f32"
    )
    if residual_axes:
        yield partial_sum_collective(
            "reduce-scatter", summed, times * (4 + recomputations), stream * reduced
        )
        yield bf16_collective("all-gather", summed, times * 6, stream * sizes.item_bytes)
    else:
        yield partial_sum_collective(
            "all-reduce", summed, times * (4 + recomputations), stream * reduced
        )
    vocab = _axes(use, ("vocab",), mesh)
    vocab_op = "reduce-scatter" if residual_axes else "all-reduce"
    yield bf16_collective(
        vocab_op, vocab, batch.microbatches, stream * sizes.item_bytes
    )  # rows of the embedding
    yield bf16_collective(
        vocab_op, vocab, batch.microbatches, stream * reduced
    )  # gradient of hidden
    if residual_axes:
        yield bf16_collective(
            "all-gather", vocab, batch.microbatches * 3, stream * sizes.item_bytes
        )
    yield from _of_attention(program, sizes)
    yield from _of_experts(program, sizes)
    stages = ("stage",) if mesh.axes.get("stage", 1) > 1 else ()
    residual = sizes.sequences * sizes.seq_residual * model.embed * sizes.item_bytes
    ticks = batch.microbatches * program.pipeline.virtual_stages + mesh.axes.get("stage", 1) - 1
    yield _collective("collective-permute", stages, 2 * ticks, residual, mesh=mesh, dtype="bf16")


def _of_attention(program: ResolvedProgram, sizes: DeviceSizes) -> Iterator[Collective]:
    """Yield the collectives of ring attention and of Ulysses (heads exchanged for positions)."""
    model, mesh, use = program.model, program.mesh, program.rules.activations
    assert model.head_dim and model.kv_heads
    times = round(sizes.layers) * program.batch.microbatches
    ring = _axes(use, ("kv_seq",), mesh)
    pair = 2 * sizes.sequences * sizes.kv_positions * sizes.kv_heads * model.head_dim
    collective = partial(_collective, mesh=mesh)
    hops = max(0, mesh.size(ring) - 1)
    yield collective(
        "collective-permute", ring, 2 * hops * times, pair * sizes.item_bytes, dtype="bf16"
    )
    ring_size = mesh.size(ring)  # gradients of keys and values go around the complete ring
    yield collective("collective-permute", ring, ring_size * times, pair * 4, dtype="f32")
    exchange_axes = _axes(use, ("attention_heads",), mesh)
    token = sizes.sequences * sizes.seq_in_block * model.head_dim * sizes.item_bytes
    query = token * sizes.heads * mesh.size(exchange_axes)
    # Key heads are repeated where they are fewer than devices.
    local_kv_heads = model.kv_heads // mesh.size(_axes(use, ("kv_heads",), mesh))
    key = token * math.lcm(local_kv_heads, mesh.size(exchange_axes))
    yield collective("all-to-all", exchange_axes, 4 * times, query, dtype="bf16")
    yield collective("all-to-all", exchange_axes, 4 * times, key, dtype="bf16")


def _of_experts(program: ResolvedProgram, sizes: DeviceSizes) -> Iterator[Collective]:
    """Yield the collectives that send tokens to their experts and back, forward and backward."""
    model, mesh = program.model, program.mesh
    if model.moe is None:
        return
    times = round(sizes.layers) * program.batch.microbatches
    expert_axes = _axes(program.rules.activations, ("experts",), mesh)
    stream = sizes.sequences * sizes.seq_in_block * model.embed
    collective = partial(_collective, mesh=mesh, dtype="bf16")
    if (capacity := model.moe.capacity_factor) is not None:
        sent_bytes = stream * model.moe.experts_per_token * capacity * sizes.item_bytes
        yield collective("all-to-all", expert_axes, 4 * times, sent_bytes)
        return
    shared = stream * mesh.size(expert_axes)
    yield collective("all-gather", expert_axes, 2 * times, shared * sizes.item_bytes)
    yield collective("reduce-scatter", expert_axes, 2 * times, shared * 4)


def _collective(
    op: str, axes: tuple[str, ...], count: int, size: float, *, mesh: MeshShape, dtype: str
) -> Collective:
    return Collective(op, axes, mesh.size(axes), count, round(size), dtype)


def _axes(table, names: tuple[str, ...], mesh: MeshShape) -> tuple[str, ...]:
    """Return the mesh axes of more than one device that shard any of the array axes."""
    sharding_axes = {axis for name in names for axis in table.get(name, ())}
    return tuple(axis for axis in MESH_AXES if axis in sharding_axes and mesh.axes.get(axis, 1) > 1)
