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
    found = [*_of_weights(program, weights), *_of_activations(program)]
    return tuple(one for one in found if one.devices > 1 and one.bytes and one.count)


def bubble_of(program: ResolvedProgram) -> float:
    """Return the fraction of a pipeline's ticks in which a stage is idle."""
    pipeline, stages = program.pipeline, program.mesh.axes.get("stage", 1)
    return bubble_fraction(
        pipeline.schedule, stages, pipeline.virtual_stages, program.batch.microbatches
    )


def _of_weights(program: ResolvedProgram, weights: Sequence[ShardedWeight]) -> Iterator[Collective]:
    """Yield the collectives that gather weights for use and reduce gradients to their shards."""
    batch, mesh = program.batch, program.mesh
    spread = _axes(program.rules.activations, ("batch", "seq"), mesh)
    width, dtype = (2, "bf16") if program.model.dtype == "bfloat16" else (4, "f32")
    rows = _looked_up_rows(program)
    deferred = batch.gradient_reduction == "per_step" and "data" in spread
    # XLA for GPUs moves an all-reduce out of the accumulation loop. It gathers the head once, and
    # also, by an option in lowering/xla/backend.py, what a layer's backward pass uses twice.
    on_cards = program.target.platform == "cuda"
    for weight in weights:
        if weight.elements_per_layer < 1e5:
            continue  # norms and biases
        layers = weight.spec.shape[0] // mesh.axes.get("stage", 1) if weight.in_layers else 1
        gathered = tuple(axis for axis in weight.stored if axis not in (*weight.in_use, "stage"))
        here = weight.used_of_a_layer(mesh)
        times = layers * batch.microbatches
        at_once = on_cards and not weight.in_layers
        uses = 1 if weight.path.startswith("embedding") or at_once else 2
        if program.loss.kind == "dpo" and weight.frozen:
            uses = 1 if program.adapter is None else uses + 1  # DPO's reference model
        if program.model.remat == "full" and weight.in_layers and weight.path[-4:] != "down":
            uses += not on_cards  # recomputation gathers weights again
        yield _collective(
            "all-gather", gathered, times * uses, here * width, mesh=mesh, dtype=dtype
        )
        if weight.frozen:
            continue
        yield _gradient_reduction(weight, gathered, times, here * 4, rows, mesh)
        held = here / mesh.size(gathered)
        pieces = weight.optimizer
        for axis in (name for name in spread if name not in gathered):
            once = layers if axis == "data" and deferred else times
            if axis in pieces and not deferred:
                yield _gradient_reduction(weight, (axis,), once, held * 4, rows, mesh)
            elif axis in pieces:
                yield _collective("reduce-scatter", (axis,), once, held * 4, mesh=mesh, dtype="f32")
            else:
                count = layers if on_cards and not weight.in_layers else once
                yield _collective("all-reduce", (axis,), count, held * 4, mesh=mesh, dtype="f32")
        back = tuple(axis for axis in weight.optimizer if axis not in weight.stored)
        yield _collective("all-gather", back, 1, held * layers * 4, mesh=mesh, dtype="f32")


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
    pieces = [axis for axis in _axes(use, ("residual",), mesh) if axis in summed]
    again = 1 if model.remat == "full" else 0
    on_chip = program.target.platform in ("cuda", "rocm", "tpu")
    reduced = (
        sizes.item_bytes if on_chip else 4
    )  # the dtype of partial sums in graphtrain/models/matmul.py
    each = partial(_collective, mesh=mesh, dtype="bf16")
    sums = partial(_collective, mesh=mesh, dtype="bf16" if reduced == 2 else "f32")
    if pieces:
        yield sums("reduce-scatter", summed, times * (4 + again), stream * reduced)
        yield each("all-gather", summed, times * 6, stream * sizes.item_bytes)
    else:
        yield sums("all-reduce", summed, times * (4 + again), stream * reduced)
    vocab = _axes(use, ("vocab",), mesh)
    joined = "reduce-scatter" if pieces else "all-reduce"
    yield each(
        joined, vocab, batch.microbatches, stream * sizes.item_bytes
    )  # rows of the embedding
    yield each(joined, vocab, batch.microbatches, stream * reduced)  # gradient of hidden
    if pieces:
        yield each("all-gather", vocab, batch.microbatches * 3, stream * sizes.item_bytes)
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
    ring = _axes(use, ("attended",), mesh)
    pair = 2 * sizes.sequences * sizes.kv_positions * sizes.kv_heads * model.head_dim
    each = partial(_collective, mesh=mesh)
    hops = max(0, mesh.size(ring) - 1)
    yield each("collective-permute", ring, 2 * hops * times, pair * sizes.item_bytes, dtype="bf16")
    home = mesh.size(ring)  # gradients of keys and values go around the complete ring
    yield each("collective-permute", ring, home * times, pair * 4, dtype="f32")
    swapped = _axes(use, ("attention_heads",), mesh)
    token = sizes.sequences * sizes.seq_in_block * model.head_dim * sizes.item_bytes
    query = token * sizes.heads * mesh.size(swapped)
    # Key heads are repeated where they are fewer than devices.
    together = model.kv_heads // mesh.size(_axes(use, ("kv_heads",), mesh))
    key = token * math.lcm(together, mesh.size(swapped))
    yield each("all-to-all", swapped, 4 * times, query, dtype="bf16")
    yield each("all-to-all", swapped, 4 * times, key, dtype="bf16")


def _of_experts(program: ResolvedProgram, sizes: DeviceSizes) -> Iterator[Collective]:
    """Yield the collectives that send tokens to their experts and back, forward and backward."""
    model, mesh = program.model, program.mesh
    if model.moe is None:
        return
    times = round(sizes.layers) * program.batch.microbatches
    over = _axes(program.rules.activations, ("experts",), mesh)
    stream = sizes.sequences * sizes.seq_in_block * model.embed
    each = partial(_collective, mesh=mesh, dtype="bf16")
    if (capacity := model.moe.capacity_factor) is not None:
        sent = stream * model.moe.experts_per_token * capacity * sizes.item_bytes
        yield each("all-to-all", over, 4 * times, sent)
        return
    shared = stream * mesh.size(over)
    yield each("all-gather", over, 2 * times, shared * sizes.item_bytes)
    yield each("reduce-scatter", over, 2 * times, shared * 4)


def _collective(
    op: str, axes: tuple[str, ...], count: int, size: float, *, mesh: MeshShape, dtype: str
) -> Collective:
    return Collective(op, axes, mesh.size(axes), count, round(size), dtype)


def _axes(table, names: tuple[str, ...], mesh: MeshShape) -> tuple[str, ...]:
    """Return the mesh axes of more than one device that shard any of the array axes."""
    together = {axis for name in names for axis in table.get(name, ())}
    return tuple(axis for axis in MESH_AXES if axis in together and mesh.axes.get(axis, 1) > 1)
