"""Collectives of a training step, predicted by arithmetic from the sharding rules."""

from __future__ import annotations

from collections.abc import Sequence

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.cost_model.activation_traffic import activation_collectives
from graphtrain.cost_model.tower import tower_program
from graphtrain.cost_model.update_traffic import update_collectives
from graphtrain.cost_model.weight_traffic import weight_collectives
from graphtrain.cost_model.weights import ShardedWeight, shard_weights
from lowering.hlo.collectives import Collective
from sharding_rules.pipeline import bubble_fraction


def predict_collectives(
    program: ResolvedProgram, weights: Sequence[ShardedWeight] | None = None
) -> tuple[Collective, ...]:
    """Predict the collectives of a training step, without those of single numbers.

    Compilers merge collectives and choose among equivalent ones. The prediction follows what XLA
    does for NVIDIA GPUs, and for CPUs where that differs (tests/benchmarks/collectives.py).

    Args:
        program: the program.
        weights: result of shard_weights, if the caller has it.
    """
    if weights is None:
        weights = shard_weights(program)
    collectives = [
        *weight_collectives(program, weights),
        *update_collectives(program, weights),
        *activation_collectives(program),
    ]
    if (tower := tower_program(program)) is not None:
        collectives += predict_collectives(tower)
    return tuple(
        collective
        for collective in collectives
        if collective.devices > 1 and collective.bytes and collective.count
    )


def bubble_of(program: ResolvedProgram) -> float:
    """Return the fraction of a pipeline's ticks in which a stage is idle."""
    pipeline, stages = program.pipeline, program.mesh.axes.get("stage", 1)
    return bubble_fraction(stages, pipeline.virtual_stages, program.batch.microbatches)
