"""Collectives of the optimizer's update, by arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.cost_model.predicted_collective import activation_dtype, collective
from graphtrain.cost_model.weights import ShardedWeight
from graphtrain.models.matrices import MatrixGroup, group_matrices, is_hidden_matrix
from graphtrain.models.optimizer_state import soap_squares
from graphtrain.models.preconditioners import square_group
from lowering.hlo.collectives import Collective
from sharding_rules.arrays import ArraySpec
from sharding_rules.plan import make_layout

_FLOAT32 = 4.0, "f32"


def update_collectives(
    program: ResolvedProgram, weights: Sequence[ShardedWeight]
) -> Iterator[Collective]:
    """Yield the all-to-alls that bring whole matrices to devices for Muon or SOAP, and back."""
    kind = program.optimizer.kind
    if kind not in ("muon", "soap"):
        return
    matrices = {
        weight.path: weight.spec
        for weight in weights
        if not weight.frozen and is_hidden_matrix(weight.spec)
    }
    for group in group_matrices(matrices, program.rules, program.mesh):
        if kind == "muon":
            yield from _exchange(program, group, *activation_dtype(program))
        else:
            yield from _of_soap(program, group, matrices)


def _of_soap(
    program: ResolvedProgram, group: MatrixGroup, matrices: Mapping[str, ArraySpec]
) -> Iterator[Collective]:
    """Yield the exchanges of gradients and second moments, of momenta, and of each square matrix.

    Momenta do not come back.
    """
    yield from _exchange(program, group, *_FLOAT32)
    yield from _exchange(program, group, *_FLOAT32)
    yield from _exchange(program, group, *_FLOAT32, returns=False)
    specs = {path: soap_squares(matrices[path], program.optimizer) for path in group.axes}
    first = next(iter(specs))
    for part, spec in specs[first].items():
        squares = {path: of_path[part] for path, of_path in specs.items()}
        state = replace(spec, role="optimizer")
        layout = make_layout(f"optimizer/{part}/{first}", state, program.rules, program.mesh)
        yield from _exchange(program, square_group(group, squares, layout.split), *_FLOAT32)


def _exchange(
    program: ResolvedProgram, group: MatrixGroup, item: float, dtype: str, *, returns: bool = True
) -> Iterator[Collective]:
    size = group.padded_count * math.prod(group.shard_shape) * item  # of all shards of a device
    for move in group.moves:
        if move.dimension is None:  # only back, from the device that has each matrix
            count = 1 if returns else 0
            whole = partial(collective, "all-gather", (move.axis,), count, size)
            yield whole(mesh=program.mesh, dtype=dtype)
            size /= move.devices
        else:
            count = 2 if returns else 1
            moved = partial(collective, "all-to-all", (move.axis,), count, size)
            yield moved(mesh=program.mesh, dtype=dtype)
