"""Collectives of the optimizer's update, by arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.cost_model.predicted_collective import activation_dtype, collective
from graphtrain.cost_model.weights import ShardedWeight
from graphtrain.models.matrices import MatrixGroup, group_matrices, is_hidden_matrix
from lowering.hlo.collectives import Collective


def update_collectives(
    program: ResolvedProgram, weights: Sequence[ShardedWeight]
) -> Iterator[Collective]:
    """Yield the all-to-alls that bring whole matrices to devices for Muon, and shards back."""
    if program.optimizer.kind != "muon":
        return
    matrices = {
        weight.path: weight.spec
        for weight in weights
        if not weight.frozen and is_hidden_matrix(weight.spec)
    }
    for group in group_matrices(matrices, program.rules, program.mesh):
        yield from _of_group(program, group)


def _of_group(program: ResolvedProgram, group: MatrixGroup) -> Iterator[Collective]:
    item, dtype = activation_dtype(program)
    size = group.padded_count * math.prod(group.shard_shape) * item  # of all shards of a device
    for move in group.moves:
        if move.dimension is None:  # only back, from the device that has each matrix
            yield collective("all-gather", (move.axis,), 1, size, mesh=program.mesh, dtype=dtype)
            size /= move.devices
        else:
            yield collective("all-to-all", (move.axis,), 2, size, mesh=program.mesh, dtype=dtype)
