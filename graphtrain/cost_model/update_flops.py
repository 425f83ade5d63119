"""FLOPs of the optimizer's update, by arithmetic."""

from __future__ import annotations

import math

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.cost_model.padded_stages import with_padding_layers
from graphtrain.cost_model.weights import shard_weights
from graphtrain.models.matrices import MatrixGroup, group_matrices, is_hidden_matrix


def update_flops(program: ResolvedProgram) -> float:
    """Return the FLOPs of the matrix products of an update, on all devices together.

    These are Muon's Newton-Schulz iterations. A device that has only padding computes it too.
    """
    if program.optimizer.kind != "muon":
        return 0.0
    matrices = {
        weight.path: weight.spec
        for weight in shard_weights(with_padding_layers(program))
        if not weight.frozen and is_hidden_matrix(weight.spec)
    }
    steps = program.optimizer.newton_schulz_steps_or_default
    groups = group_matrices(matrices, program.rules, program.mesh)
    of_device = sum(_matrices_of_device(group) * _of_iteration(group) * steps for group in groups)
    return of_device * program.target.devices


def _matrices_of_device(group: MatrixGroup) -> int:
    return group.padded_count // math.prod(move.devices for move in group.moves)


def _of_iteration(group: MatrixGroup) -> float:
    """Return the FLOPs of one iteration for one whole matrix: two products with it, one square."""
    shape = list(group.shard_shape)
    for move in group.moves:
        if move.dimension is not None:
            shape[move.dimension - 1] *= move.devices
    rows, columns = (
        math.prod(shape[: group.row_dimensions]),
        math.prod(shape[group.row_dimensions :]),
    )
    short, long = sorted((rows, columns))
    return 4 * short * short * long + 2 * short**3
