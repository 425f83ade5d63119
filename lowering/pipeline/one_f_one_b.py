"""1F1B pipeline schedule: a backward pass follows as soon as the loss of its microbatch is known.

Source: Narayanan et al. 2021, section 2.2, https://arxiv.org/abs/2104.04473
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from lowering.pipeline.one_f_one_b_device import DeviceWork
from lowering.pipeline.one_f_one_b_loops import device_gradients
from lowering.pipeline.recorded import (
    RecordedParts,
    TickOrder,
    join_positions,
    last_spec,
    stage_spec,
)
from lowering.pipeline.schedule import (
    PartWeights,
    Pipeline,
    PipelineLoss,
    loop_parameters,
    map_stages,
    scalars_as_arrays,
)
from lowering.tracing.constrain import manual_axes
from lowering.tracing.recording import Recorded
from lowering.trees import Tree
from sharding_rules.errors import ShardingError


def one_f_one_b_gradients(
    pipeline: Pipeline, parameters: Tree, microbatches: Tree
) -> tuple[PipelineLoss, Tree]:
    """Compute the objective, the metrics and the gradients with the 1F1B schedule.

    Of the three phases, the first has forward passes alone, the second a forward and a backward
    pass in every tick, and the third backward passes alone. So a step of M microbatches takes the
    time of M + S - 1 forward and backward passes of a stage, or with V virtual stages that of
    M V + S - 1 of a chunk. A stage stores (V + 1) S - 1 inputs of chunks, independent of M.

    Gradients are those of the trained weights of each part.

    `last` runs directly after the last stage; every stage computes 1/S of the positions, whose
    number must be a multiple of S.
    """
    return recorded_one_f_one_b(pipeline, parameters, microbatches)[:2]


def recorded_one_f_one_b(
    pipeline: Pipeline, parameters: Tree, microbatches: Tree
) -> tuple[PipelineLoss, Tree, RecordedParts, RecordedParts]:
    """Compute as `one_f_one_b_gradients`; return the activations and gradients that are wanted too.

    Returns:
        Objective and metrics, gradients of the trained parameters, activations, and the gradients
        of the objective with respect to activations.

    Raises:
        ShardingError: `last` needs all positions of a sequence.
    """
    if pipeline.last_mixes_positions:
        raise ShardingError(
            'pipeline.schedule = "1f1b" splits what follows the stages over them by position, but '
            "the blocks behind the stages need all positions of a sequence; set it to "
            '"circular" or "gpipe"'
        )
    assert pipeline.beside is None, "`last` has some positions of these arrays"
    axes = pipeline.axes("1f1b", microbatches)
    ring, copies, manual = axes.ring, axes.copies, axes.all
    count = len(jax.tree.leaves(microbatches)[0])
    order = TickOrder(ring, count, pipeline.virtual_stages)

    def device(parameters: Tree, queue: jax.Array, shards: Tree, of_all: Tree) -> Any:
        shards = jax.tree.map(lambda shard: shard[..., 0], shards)
        with manual_axes(manual):
            work = DeviceWork(pipeline, order, copies.all, parameters, shards, of_all)
            value, gradients, queue, recorded = device_gradients(work, queue)
        return scalars_as_arrays(value), gradients, queue, recorded

    parameter_specs = pipeline.parameter_specs(ring)
    queue_spec = PartitionSpec(ring.axis, *copies)
    shard_spec = PartitionSpec(None, *copies, ring.axis)
    specs = parameter_specs, queue_spec, shard_spec, PartitionSpec(None, copies.batch)
    of_device = stage_spec(ring, copies), last_spec(ring, copies)
    outputs = PartitionSpec(manual), parameter_specs, queue_spec, (of_device, of_device)
    forward_backward = map_stages(device, manual, specs, outputs)
    queue, embed_back, of_first = jax.vjp(
        lambda trained, slots: pipeline.embed(
            ring, parameters["first"]._replace(trained=trained), microbatches, slots
        ),
        parameters["first"].trained,
        _slots_of_first(pipeline, parameters["first"], microbatches),
        has_aux=True,
    )
    # Shard s contains positions s, s + S, ..., which keeps a split over tensor or context.
    divided, of_all = pipeline.divide(microbatches)
    shards = jax.tree.map(lambda x: x.reshape(*x.shape[:2], -1, ring.size), divided)
    values, gradients, queue_gradient, (forward, backward) = forward_backward(
        loop_parameters(parameters), queue, shards, of_all
    )
    gradients["first"], back_first = embed_back(queue_gradient)
    recorded, back = (
        RecordedParts(
            of_first,
            order.to_microbatches(of_stages, tick_of),
            join_positions(of_last, order),
        )
        for of_first, (of_stages, of_last), tick_of in (
            (of_first, forward, order.forward),
            (back_first, backward, order.backward),
        )
    )
    return jax.tree.map(jnp.sum, values), gradients, recorded, back


def _slots_of_first(pipeline: Pipeline, weights: PartWeights, microbatches: Tree) -> Recorded:
    """Return zeros for the activations of `first` whose gradients are wanted."""
    count, one = len(jax.tree.leaves(microbatches)[0]), jax.tree.map(lambda x: x[0], microbatches)
    zeros = pipeline.slots(pipeline.first, weights, one, jnp.int32(0))
    return {name: jnp.broadcast_to(x, (count, *x.shape)) for name, x in zeros.items()}
