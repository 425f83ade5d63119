"""Collectives that gather weights for use and reduce their gradients, by arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.cost_model.gradient_traffic import gradient_collectives
from graphtrain.cost_model.passes import Passes
from graphtrain.cost_model.predicted_collective import (
    activation_dtype,
    collective,
    gathered_axes,
    is_tied,
    layers_per_device,
    uses_ahead,
)
from graphtrain.cost_model.weights import ShardedWeight
from graphtrain.models.updated_weights import gathered_by_layer
from lowering.hlo.collectives import Collective


def weight_collectives(
    program: ResolvedProgram, weights: Sequence[ShardedWeight]
) -> Iterator[Collective]:
    """Yield the collectives that gather weights for use and reduce gradients to their shards."""
    # Others are not gathered after the update; to find that out takes 6 % of a search.
    in_smaller_shards = {one.path: one.spec for one in weights if {*one.optimizer} > {*one.stored}}
    by_layer = gathered_by_layer(program, in_smaller_shards)
    for weight in weights:
        yield from _gathers(program, weight)
        if weight.frozen:
            continue
        yield from gradient_collectives(program, weight)
        layers = weight.spec.shape[0] if weight.path in by_layer else 1
        yield from _updated(program, weight, layers)


def _gathers(program: ResolvedProgram, weight: ShardedWeight) -> Iterator[Collective]:
    """Yield the all-gather of a stored weight for the products of the step.

    Of weights outside of the layers that stages share, the embedding is gathered over them last,
    and the LM head first, as it is stored.
    """
    mesh, (item, dtype) = program.mesh, activation_dtype(program)
    axes, used = gathered_axes(weight), weight.used_of_a_layer(mesh)
    gather = partial(collective, "all-gather", mesh=mesh)
    size = used * item
    if weight.frozen and (codes := _codes_of_a_layer(program, weight)) < 2 * used:
        size, dtype = codes, "u8"  # quantized weights are gathered as codes
    if not weight.in_layers and "stage" in weight.stored:
        is_lookup = weight.path.startswith("embedding")
        whole, kind = (size, dtype) if is_lookup else (4 * used / mesh.size(axes), "f32")
        yield gather(("stage",), 1, whole, dtype=kind)
        size /= mesh.size(("stage",)) if is_lookup else 1
    yield gather(axes, _uses(program, weight), size, dtype=dtype)


def _codes_of_a_layer(program: ResolvedProgram, weight: ShardedWeight) -> float:
    """Return the bytes of a frozen weight of one layer, as it is stored, on all gathered axes."""
    layers = layers_per_device(program, weight)
    return weight.parameter_bytes * program.mesh.size(gathered_axes(weight)) / layers


def _uses(program: ResolvedProgram, weight: ShardedWeight) -> int:
    """Return how often a step gathers a weight.

    XLA for GPUs gathers weights outside of the layers once. By an option in
    lowering/xla/backend.py it also gathers once what a layer's backward pass uses twice.
    """
    on_gpu, passes = program.target.platform == "cuda", Passes.of(program)
    of_reference = program.loss.kind == "dpo" and weight.frozen  # DPO's reference model
    if weight.in_layers:
        return passes.layers * _uses_in_a_layer(program, weight, passes)
    if of_reference and program.adapter is None:
        return passes.heads
    uses = passes.heads if of_reference else uses_ahead(program, weight)
    if not weight.path.startswith("embedding"):
        return uses + _uses_of_head(program, passes, on_gpu)
    tied = is_tied(program, weight) * _uses_of_head(program, passes, on_gpu)
    return uses + passes.embeddings + tied


def _uses_in_a_layer(program: ResolvedProgram, weight: ShardedWeight, passes: Passes) -> int:
    """Return how often each pass of a layer, forward and backward, gathers one of its weights."""
    on_gpu, is_last = program.target.platform == "cuda", weight.path.endswith("down")
    uses = 2
    if program.loss.kind == "dpo" and weight.frozen:
        uses = 1 if program.adapter is None else uses + 1  # DPO's reference model
    again = passes.recomputes_layers
    if not on_gpu and not is_last:  # recomputation gathers weights again
        again = max((program.model.remat == "full") + again, passes.recomputes_stage)
    return uses + again


def _uses_of_head(program: ResolvedProgram, passes: Passes, on_gpu: bool) -> int:
    """Return how often a step gathers the LM head.

    The loop over microbatches with which GPipe and circular schedules end gathers it in each, on
    GPUs once. XLA for CPUs moves the gathers out of that loop, and all of 1F1B's.
    """
    if passes.ticks and (program.pipeline.schedule == "1f1b" or not on_gpu):
        return 2
    return passes.heads * (1 if on_gpu else 2)


def _updated(program: ResolvedProgram, weight: ShardedWeight, layers: int) -> Iterator[Collective]:
    """Yield the all-gather of weights that were updated in smaller shards than they are stored.

    Schedule-free also gathers the weights at which it takes the gradient.

    Where both split the same dimension, shards of the smaller and of the larger division are not on
    the same devices: they are permuted before the update and after it.

    Args:
        program: the program.
        weight: the weight.
        layers: Number of layers that are gathered one after another; 1: all at once.
    """
    mesh = program.mesh
    regathered = tuple(axis for axis in weight.optimizer if axis not in weight.stored)
    total = 4 * weight.used_of_a_layer(mesh) * layers_per_device(program, weight)
    gather = partial(collective, mesh=mesh, dtype="f32")
    stored = total / mesh.size(gathered_axes(weight))
    if program.optimizer.kind == "schedule_free":
        yield gather("all-gather", regathered, 1, stored)
    yield gather("all-gather", regathered, layers, stored / layers)
    if regathered and (shared := gathered_axes(weight)):
        axes = (*regathered, *shared)
        yield gather("collective-permute", axes, 1, total / mesh.size(axes))
        yield gather("collective-permute", axes, layers, total / mesh.size(axes) / layers)
