"""Collectives that sum the gradients of weights over tokens, to their shards, by arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.cost_model.cool_down import copies_of_weights, overlaps_sums, sums_beside_ticks
from graphtrain.cost_model.passes import Passes
from graphtrain.cost_model.predicted_collective import (
    activation_dtype,
    collective,
    gathered_axes,
    is_tied,
    layers_per_device,
    reduce_scatter,
    splitting_axes,
    uses_ahead,
)
from graphtrain.cost_model.sizes import DeviceSizes
from graphtrain.cost_model.weights import ShardedWeight
from lowering.hlo.collectives import Collective

Axes = tuple[str, ...]


def gradient_collectives(program: ResolvedProgram, weight: ShardedWeight) -> Iterator[Collective]:
    """Yield the collectives that sum a gradient over tokens, to the shards of its moments."""
    batch, mesh, table = program.batch, program.mesh, program.rules.activations
    tokens = splitting_axes(table, ("batch", "seq"), mesh)
    if weight.path == "ahead/projection":  # each device has the gradients of its residual stream
        tokens = splitting_axes(table, ("batch", "residual"), mesh)
    tokens = tuple(axis for axis in tokens if axis not in weight.in_use)
    if program.stages is not None:
        yield from _gradient_in_pipeline(program, weight, tokens)
        return
    deferred = batch.gradient_reduction == "per_step" and "data" in tokens
    now = tuple(axis for axis in tokens if not (deferred and axis == "data"))
    times = layers_per_device(program, weight) * batch.microbatches
    times += uses_ahead(program, weight)
    if weight.path.startswith("embedding") and not deferred:
        yield from _lookup_gradient(program, weight, now, times)
        if is_tied(program, weight):
            yield from _dense_gradient(program, weight, now, times)
    else:
        yield from _gradient_of_product(program, weight, now, times, deferred)
    if deferred:  # an explicit collective, which all compilers keep
        op = "reduce-scatter" if "data" in weight.optimizer else "all-reduce"
        size = 4 * weight.used_of_a_layer(mesh) / mesh.size(_scattered(weight, now))
        layers = layers_per_device(program, weight)
        yield collective(op, ("data",), layers, size, mesh=mesh, dtype="f32")


def _gradient_in_pipeline(
    program: ResolvedProgram, weight: ShardedWeight, tokens: Axes
) -> Iterator[Collective]:
    """Yield the sums of a gradient in a pipeline.

    Each pass sums it over axes that store shards or positions. Over axes that replicate weights,
    and over the stages, the complete gradient is summed after the last tick or beside the last.
    """
    passes, mesh = Passes.of(program), program.mesh
    size = 4 * weight.used_of_a_layer(mesh)
    if weight.path.startswith("embedding"):
        if "stage" in weight.stored:
            tokens = tuple(axis for axis in tokens if axis != "stage")
        yield from _lookup_gradient(program, weight, (*tokens, "stage"), passes.embeddings)
        if not is_tied(program, weight):
            return
    by_hand = copies_of_weights(program).all
    copies = () if program.model.moe else tuple(axis for axis in tokens if axis in by_hand)
    now = tuple(axis for axis in tokens if axis not in copies)
    times = passes.layers if weight.in_layers else passes.heads
    yield from _gradient_of_product(program, weight, now, times, summed_later=copies)
    size /= mesh.size(_scattered(weight, now))
    yield from _totals_over_copies(program, weight, copies, size)


def _totals_over_copies(
    program: ResolvedProgram, weight: ShardedWeight, copies: Axes, size: float
) -> Iterator[Collective]:
    """Yield the sums of a complete gradient of a pipeline, which are explicit collectives.

    Args:
        program: the program.
        weight: A weight of the stages, or of what follows them.
        copies: Mesh axes along which devices have the same weights.
        size: Bytes of the gradient of a layer.
    """
    summed = partial(collective, "all-reduce", mesh=program.mesh, dtype="f32")
    if not weight.in_layers:
        yield summed((*copies, "stage"), 1, size, exposed=True)
        return
    beside = sums_beside_ticks(program)
    of_tick, is_hidden = beside.rows_per_tick * size, overlaps_sums(program)
    yield summed(copies, beside.ticks, of_tick, beside_tick=is_hidden, exposed=not is_hidden)
    remaining = layers_per_device(program, weight) - beside.rows
    yield summed(copies, 1, remaining * size, exposed=True)


def _scattered(weight: ShardedWeight, tokens: Axes) -> Axes:
    """Return the axes of tokens over which a weight is stored in shards."""
    return tuple(axis for axis in tokens if axis in gathered_axes(weight))


def _gradient_of_product(
    program: ResolvedProgram,
    weight: ShardedWeight,
    tokens: Axes,
    times: int,
    deferred: bool = False,
    summed_later: Axes = (),
) -> Iterator[Collective]:
    """Yield the sum of the gradient of a matrix product, norm or bias over axes of tokens."""
    scattered = _scattered(weight, tokens)
    others = tuple(axis for axis in tokens if axis not in scattered)
    residual = splitting_axes(program.rules.activations, ("residual",), program.mesh)
    vector_axes = {*others, *residual} - {*weight.in_use, *summed_later}
    is_small = _is_vector(weight) and not deferred and not vector_axes <= set(weight.optimizer)
    if is_small:
        size = 4 * weight.elements_per_layer
        yield from _sums(program, (*scattered, *vector_axes), times, size)
    else:
        yield from _dense_gradient(program, weight, tokens, times)


def _sums(
    program: ResolvedProgram, axes: Iterable[str], times: int, size: float
) -> Iterator[Collective]:
    """Yield a sum over axes of tokens.

    XLA for CPUs sums over sequences, positions and stages apart.
    """
    mesh, axes = program.mesh, tuple(axes)
    positions = splitting_axes(program.rules.activations, ("seq", "residual"), mesh)
    groups: tuple[Axes, ...] = (axes,)
    if program.target.platform == "cpu":
        along = tuple(axis for axis in axes if axis in positions)
        rest = tuple(axis for axis in axes if axis not in (*along, "stage"))
        groups = along, ("stage",) if "stage" in axes else (), rest
    for group in groups:
        yield collective("all-reduce", group, times, size, mesh=mesh, dtype="f32")


def _dense_gradient(
    program: ResolvedProgram, weight: ShardedWeight, tokens: Axes, times: int
) -> Iterator[Collective]:
    """Yield the sum of a matrix product's gradient over axes of tokens, `times` in a step."""
    scattered = _scattered(weight, tokens)
    others = tuple(axis for axis in tokens if axis not in scattered)
    mesh, on_gpu = program.mesh, program.target.platform == "cuda"
    size = 4 * weight.used_of_a_layer(mesh)
    to_moments = tuple(axis for axis in others if axis in weight.optimizer)
    kept = tuple(axis for axis in others if axis not in to_moments)
    axes = (*scattered, *to_moments)
    yield collective(reduce_scatter(program), axes, times, size, mesh=mesh, dtype="f32")
    if on_gpu and not weight.in_layers and not scattered:
        times = 1  # XLA for GPUs moves this all-reduce out of the accumulation loop
    yield from _sums(program, kept, times, size / mesh.size(axes))


def _lookup_gradient(
    program: ResolvedProgram, weight: ShardedWeight, tokens: Axes, times: int
) -> Iterator[Collective]:
    """Yield the sum of an embedding's gradient over axes of tokens, `times` in a step.

    If only some axes of sequences store shards, all looked-up rows are gathered, or the complete
    sum is made everywhere, whichever is fewer bytes. Else it is summed where its shard is, unless
    the rows that a device then receives take more memory than the sum.
    """
    mesh, in_use = program.mesh, weight.in_use
    scattered = _scattered(weight, tokens)
    others = tuple(axis for axis in tokens if axis not in scattered)
    to_moments = tuple(axis for axis in others if axis in weight.optimizer)
    axes, kept = (*scattered, *to_moments), tuple(a for a in others if a not in to_moments)
    across = splitting_axes(program.rules.activations, ("seq", "stages"), mesh)
    beside = tuple(axis for axis in kept if axis not in across)  # they split sequences, like axes
    gradient = 4 * weight.used_of_a_layer(mesh)
    permute = partial(collective, "collective-permute", (*axes, *beside, *in_use), times, mesh=mesh)
    rows, dtype = _looked_up_rows(program)
    few_rows = rows * mesh.size(kept) <= gradient
    if not axes or (not beside and (weight.path != "embedding/tokens" or not (kept or few_rows))):
        yield from _dense_gradient(program, weight, tokens, times)
        return
    everyone = (*axes, *kept)
    if beside and rows * mesh.size(everyone) < gradient:
        yield collective(
            "all-gather", everyone, times, rows * mesh.size(everyone), mesh=mesh, dtype=dtype
        )
        return
    received = _float32_rows(program) * (mesh.size(kept) - 1)
    if beside or not few_rows or received > gradient * (1 - 1 / mesh.size(axes)):
        yield from _sums(program, everyone, times, gradient)
        if in_use:
            yield permute(gradient / mesh.size(axes), dtype="f32")
        return
    yield from _lookup_gradient_in_shards(program, weight, axes, kept, times)


def _lookup_gradient_in_shards(
    program: ResolvedProgram, weight: ShardedWeight, axes: Axes, kept: Axes, times: int
) -> Iterator[Collective]:
    """Yield what sends the gradients of looked-up rows to the shards of the embedding.

    Args:
        program: the program.
        weight: the embedding.
        axes: Mesh axes of tokens over which its gradient is stored in shards.
        kept: Mesh axes that split tokens in other dimensions.
        times: Number of sums in a step.
    """
    mesh = program.mesh
    rows, dtype = _looked_up_rows(program)
    rows *= mesh.size(kept)
    yield collective("all-gather", kept, times, rows, mesh=mesh, dtype=dtype)
    yield collective("all-to-all", axes, times, rows, mesh=mesh, dtype=dtype)
    positions = 4 * _embedded_sequences(program) * program.batch.seq_len
    if not weight.in_use:
        size = positions * mesh.size(axes)
        yield collective("all-gather", axes, times, size, mesh=mesh, dtype="s32")
    if weight.in_use or "stage" in kept:
        everyone = (*axes, *kept, *weight.in_use)
        yield collective("collective-permute", everyone, times, positions, mesh=mesh, dtype="s32")
    if weight.in_use and program.target.platform != "cpu":
        gradient = 4 * weight.used_of_a_layer(mesh)
        size = gradient / mesh.size(axes) * mesh.size(weight.in_use)
        yield collective("reduce-scatter", weight.in_use, times, size, mesh=mesh, dtype="f32")


def _looked_up_rows(program: ResolvedProgram) -> tuple[float, str]:
    """Return bytes and dtype of the gradients of the embedding rows that a device looks up.

    TPU programs convert them to float32 before they send them.
    """
    item, dtype = (4, "f32") if program.target.platform == "tpu" else activation_dtype(program)
    return _float32_rows(program) / 4 * item, dtype


def _float32_rows(program: ResolvedProgram) -> float:
    """Return the bytes of the embedding rows that a device looks up at once, in float32."""
    inside = DeviceSizes.of(program).seq_in_block
    return 4 * _embedded_sequences(program) * inside * program.model.embed


def _embedded_sequences(program: ResolvedProgram) -> float:
    """Return the number of sequences that a device embeds at once."""
    return DeviceSizes.of(program).sequences * Passes.of(program).embedded


def _is_vector(weight: ShardedWeight) -> bool:
    """Return whether a weight is the scale of a norm, or a bias of the residual stream."""
    return [axis for axis in weight.spec.axes if axis != "layers"] == ["embed"]
