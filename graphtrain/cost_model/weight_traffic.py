"""Collectives that gather weights for use and reduce their gradients, by arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.cost_model.predicted_collective import (
    activation_dtype,
    collective,
    reduce_scatter,
    splitting_axes,
)
from graphtrain.cost_model.sizes import DeviceSizes
from graphtrain.cost_model.weights import ShardedWeight
from lowering.hlo.collectives import Collective

Axes = tuple[str, ...]


def weight_collectives(
    program: ResolvedProgram, weights: Sequence[ShardedWeight]
) -> Iterator[Collective]:
    """Yield the collectives that gather weights for use and reduce gradients to their shards."""
    for weight in weights:
        yield from _gathers(program, weight)
        if weight.frozen:
            continue
        yield from _gradient(program, weight)
        yield from _updated(program, weight)


def _gathered_axes(weight: ShardedWeight) -> Axes:
    """Return the mesh axes over which a stored weight is gathered for use."""
    return tuple(axis for axis in weight.stored if axis not in (*weight.in_use, "stage"))


def _layers(program: ResolvedProgram, weight: ShardedWeight) -> int:
    """Return the number of layers that a device holds; 1 for a weight outside of the layers."""
    stages = program.mesh.axes.get("stage", 1)
    return weight.spec.shape[0] // stages if weight.in_layers else 1


def _is_tied(program: ResolvedProgram, weight: ShardedWeight) -> bool:
    """Return whether the weight is an embedding that is also the LM head."""
    return program.model.tie_word_embeddings and weight.path == "embedding/tokens"


def _gathers(program: ResolvedProgram, weight: ShardedWeight) -> Iterator[Collective]:
    """Yield the all-gather of a stored weight for the products of the step.

    XLA for GPUs gathers weights outside of the layers once. By an option in
    lowering/xla/backend.py it also gathers once what a layer's backward pass uses twice.
    """
    model, mesh, on_gpu = program.model, program.mesh, program.target.platform == "cuda"
    item, dtype = activation_dtype(program)
    at_once = on_gpu and not weight.in_layers
    is_lookup = weight.path.startswith("embedding")
    uses = 1 if is_lookup or at_once else 2
    uses += _is_tied(program, weight) * (1 if at_once else 2)
    if program.loss.kind == "dpo" and weight.frozen:
        uses = 1 if program.adapter is None else uses + 1  # DPO's reference model
    if model.remat == "full" and weight.in_layers and weight.path[-4:] != "down":
        uses += not on_gpu  # recomputation gathers weights again
    times = _layers(program, weight) * program.batch.microbatches * uses
    size = weight.used_of_a_layer(mesh) * item
    yield collective("all-gather", _gathered_axes(weight), times, size, mesh=mesh, dtype=dtype)


def _gradient(program: ResolvedProgram, weight: ShardedWeight) -> Iterator[Collective]:
    """Yield the collectives that sum a gradient over tokens, to the shards of its moments."""
    batch, mesh, table = program.batch, program.mesh, program.rules.activations
    tokens = splitting_axes(table, ("batch", "seq"), mesh)
    tokens = tuple(axis for axis in tokens if axis not in weight.in_use)
    deferred = batch.gradient_reduction == "per_step" and "data" in tokens
    now = tuple(axis for axis in tokens if not (deferred and axis == "data"))
    scattered = tuple(axis for axis in now if axis in _gathered_axes(weight))
    others = tuple(axis for axis in now if axis not in scattered)
    in_stages = mesh.axes.get("stage", 1) > 1  # the gradients of microbatches are summed first
    times = _layers(program, weight) * (1 if in_stages else batch.microbatches)
    residual = splitting_axes(table, ("residual",), mesh)
    vector_axes = {*others, *residual} - set(weight.in_use)
    is_small = _is_vector(weight) and not deferred and not vector_axes <= set(weight.optimizer)
    if is_small:
        size = 4 * weight.elements_per_layer
        yield from _sums(program, (*scattered, *vector_axes), times, size)
    elif weight.path.startswith("embedding") and not deferred:
        yield from _lookup_gradient(program, weight, scattered, others, times)
        if _is_tied(program, weight):
            yield from _dense_gradient(program, weight, scattered, others, times)
    elif weight.path != "head" or not in_stages:
        yield from _dense_gradient(program, weight, scattered, others, times)
    if deferred:  # an explicit collective, which all compilers keep
        op = "reduce-scatter" if "data" in weight.optimizer else "all-reduce"
        size = 4 * weight.used_of_a_layer(mesh) / mesh.size(scattered)
        layers = _layers(program, weight)
        yield collective(op, ("data",), layers, size, mesh=mesh, dtype="f32")
    if in_stages and not weight.in_layers and "stage" not in weight.stored:
        axes = ("stage", *others) if weight.path == "head" else ("stage",)
        yield from _sums(program, axes, 1, 4 * weight.used_of_a_layer(mesh))


def _sums(
    program: ResolvedProgram, axes: Iterable[str], times: int, size: float
) -> Iterator[Collective]:
    """Yield a sum over axes of tokens. XLA for CPUs sums over sequences and positions apart."""
    mesh, axes = program.mesh, tuple(axes)
    positions = splitting_axes(program.rules.activations, ("seq", "residual"), mesh)
    groups: tuple[Axes, ...] = (axes,)
    if program.target.platform == "cpu":
        along = tuple(axis for axis in axes if axis in positions)
        groups = along, tuple(axis for axis in axes if axis not in along)
    for group in groups:
        yield collective("all-reduce", group, times, size, mesh=mesh, dtype="f32")


def _dense_gradient(
    program: ResolvedProgram, weight: ShardedWeight, scattered: Axes, others: Axes, times: int
) -> Iterator[Collective]:
    """Yield the sum of a matrix product's gradient.

    Args:
        program: the program.
        weight: the weight.
        scattered: Mesh axes of tokens over which the weight is stored in shards.
        others: Mesh axes of tokens over which it is replicated.
        times: Number of sums in a step.
    """
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
    program: ResolvedProgram, weight: ShardedWeight, scattered: Axes, others: Axes, times: int
) -> Iterator[Collective]:
    """Yield the sum of an embedding's gradient. The arguments are those of _dense_gradient().

    It is summed where its shard is, if the gradients of the looked-up rows are fewer bytes to send
    there. If only some axes of sequences store shards, all rows are gathered, or the complete sum
    is made everywhere, whichever is smaller.
    """
    mesh, sizes = program.mesh, DeviceSizes.of(program)
    to_moments = tuple(axis for axis in others if axis in weight.optimizer)
    axes, kept = (*scattered, *to_moments), tuple(a for a in others if a not in to_moments)
    of_positions = set(splitting_axes(program.rules.activations, ("seq",), mesh))
    gradient = 4 * weight.used_of_a_layer(mesh)
    permute = partial(
        collective, "collective-permute", (*axes, *kept, *weight.in_use), times, mesh=mesh
    )
    rows, dtype = _looked_up_rows(program)
    if axes and not set(kept) <= of_positions:
        if (gathered := rows * mesh.size((*axes, *kept))) < gradient:
            everyone = (*axes, *kept)
            yield collective("all-gather", everyone, times, gathered, mesh=mesh, dtype=dtype)
            return
        yield from _sums(program, (*axes, *kept), times, gradient)
        if weight.in_use:
            yield permute(gradient / mesh.size(axes), dtype="f32")
        return
    rows *= mesh.size(kept)  # of all positions
    if not axes or rows > gradient or weight.path != "embedding/tokens":
        yield from _dense_gradient(program, weight, scattered, others, times)
        return
    positions = 4 * sizes.sequences * program.batch.seq_len
    yield collective("all-gather", kept, times, rows, mesh=mesh, dtype=dtype)
    yield collective("all-to-all", axes, times, rows, mesh=mesh, dtype=dtype)
    if not weight.in_use:
        size = positions * mesh.size(axes)
        yield collective("all-gather", axes, times, size, mesh=mesh, dtype="s32")
        return
    yield permute(positions, dtype="s32")
    if program.target.platform != "cpu":
        size = gradient / mesh.size(axes) * mesh.size(weight.in_use)
        yield collective("reduce-scatter", weight.in_use, times, size, mesh=mesh, dtype="f32")


def _looked_up_rows(program: ResolvedProgram) -> tuple[float, str]:
    """Return bytes and dtype of the gradients of the embedding rows that a device looks up.

    TPU programs convert them to float32 before they send them.
    """
    sizes = DeviceSizes.of(program)
    numbers = sizes.sequences * sizes.seq_in_block * program.model.embed
    item, dtype = (4, "f32") if program.target.platform == "tpu" else activation_dtype(program)
    return numbers * item, dtype


def _updated(program: ResolvedProgram, weight: ShardedWeight) -> Iterator[Collective]:
    """Yield the all-gather of weights that were updated in smaller shards than they are stored.

    Where both split the same dimension, shards of the smaller and of the larger division are not on
    the same devices: they are permuted before the update and after it.
    """
    mesh = program.mesh
    regathered = tuple(axis for axis in weight.optimizer if axis not in weight.stored)
    total = 4 * weight.used_of_a_layer(mesh) * _layers(program, weight)
    gather = partial(collective, mesh=mesh, dtype="f32")
    yield gather("all-gather", regathered, 1, total / mesh.size(_gathered_axes(weight)))
    if regathered and (shared := _gathered_axes(weight)):
        axes = (*regathered, *shared)
        yield gather("collective-permute", axes, 2, total / mesh.size(axes))


def _is_vector(weight: ShardedWeight) -> bool:
    """Return whether a weight is the scale of a norm, or a bias of the residual stream."""
    return [axis for axis in weight.spec.axes if axis != "layers"] == ["embed"]
