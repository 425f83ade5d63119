"""FLOPs of the optimizer's update, by arithmetic."""

from __future__ import annotations

import math

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema import Optimizer
from graphtrain.cost_model.padded_stages import with_padding_layers
from graphtrain.cost_model.tower import tower_program
from graphtrain.cost_model.weights import shard_weights
from graphtrain.models.matrices import MatrixGroup, group_matrices, is_hidden_matrix


def update_flops(program: ResolvedProgram) -> float:
    """Return the FLOPs of the matrix products of an update, on all devices together.

    These are Muon's Newton-Schulz iterations, or SOAP's turns into eigenbases and out of them, with
    the update of a basis in each of its `precondition_frequency` steps. A device that has only
    padding computes it too.
    """
    optimizer = program.optimizer
    if optimizer.kind not in ("muon", "soap"):
        return 0.0
    matrices = {
        weight.path: weight.spec
        for weight in shard_weights(with_padding_layers(program))
        if not weight.frozen and is_hidden_matrix(weight.spec)
    }
    of_matrix = _newton_schulz if optimizer.kind == "muon" else _soap
    groups = group_matrices(matrices, program.rules, program.mesh)
    of_device = sum(
        _matrices_of_device(group) * of_matrix(*_sides(group), optimizer) for group in groups
    )
    tower = tower_program(with_padding_layers(program))
    of_tower = 0.0 if tower is None else update_flops(tower)
    return of_device * program.target.devices + of_tower


def _matrices_of_device(group: MatrixGroup) -> int:
    return group.padded_count // math.prod(move.devices for move in group.moves)


def _sides(group: MatrixGroup) -> tuple[int, int]:
    """Return the rows and columns of a whole matrix."""
    shape = list(group.shard_shape)
    for move in group.moves:
        if move.dimension is not None:
            shape[move.dimension - 1] *= move.devices
    rows, columns = shape[: group.row_dimensions], shape[group.row_dimensions :]
    return math.prod(rows), math.prod(columns)


def _newton_schulz(rows: int, columns: int, optimizer: Optimizer) -> float:
    """Return the FLOPs of a matrix; an iteration is two products with it, and one square."""
    short, long = sorted((rows, columns))
    return (4 * short * short * long + 2 * short**3) * optimizer.newton_schulz_steps_or_default


def _soap(rows: int, columns: int, optimizer: Optimizer) -> float:
    """Return the FLOPs of a matrix.

    Each side multiplies the gradient and the momentum, then the direction, and averages squares of
    the gradient. A new basis is one more product and its QR decomposition (Householder, with Q).
    """
    total = 0.0
    for side in (rows, columns):
        if side <= optimizer.max_precondition_dim_or_default:
            basis = (2 + 8 / 3) * side**3
            total += 8 * rows * columns * side + basis / optimizer.precondition_frequency_or_default
    return total
