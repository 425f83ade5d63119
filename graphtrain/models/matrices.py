"""Matrices among the parameters, by the names of their array axes; imports no JAX.

Optimizers of matrices (Muon, Adafactor) need to know which dimensions of an array are its rows and
its columns. Stacked layers, virtual stages, experts and unnamed axes make a stack of matrices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from sharding_rules.arrays import ArraySpec
from sharding_rules.mesh import MeshShape
from sharding_rules.plan import make_layout
from sharding_rules.rules import Rules

# Name scopes of the operations that exchange matrices.
MUON_SCOPE, SOAP_SCOPE = "muon", "soap"

# of stacked parameters
STACK_AXES = ("virtual_stages", "layers", "dense_layers", "unstaged_layers", "experts")
# Axes that together are the rows, or the columns, of a matrix. Every other axis is one alone.
_HEADS = {"heads", "kv_heads", "head_dim", "nope_head_dim", "rope_head_dim", "v_head_dim"}
_LOOKED_UP = {"vocab", "positions"}  # of embeddings and the LM head


@dataclass(frozen=True)
class MatrixAxes:
    """Dimensions of an array that is a matrix, or a stack of them."""

    stack: tuple[int, ...]  # each index is another matrix
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @property
    def order(self) -> tuple[int, ...]:
        """All dimensions, those of the stack first."""
        return self.stack + self.rows + self.columns


def matrix_axes(spec: ArraySpec) -> MatrixAxes | None:
    """Return the dimensions of an array that is a matrix, or a stack of them; None if it is not."""
    stack = tuple(index for index, axis in enumerate(spec.axes) if axis in (*STACK_AXES, None))
    groups: dict[str, list[int]] = {}
    for index, axis in enumerate(spec.axes):
        if axis is not None and index not in stack:
            groups.setdefault("heads" if axis in _HEADS else axis, []).append(index)
    if len(groups) != 2:
        return None
    rows, columns = groups.values()
    return MatrixAxes(stack, tuple(rows), tuple(columns))


def is_hidden_matrix(spec: ArraySpec) -> bool:
    """Return whether an array is a matrix of the layers: no norm, bias, embedding or LM head."""
    return not _LOOKED_UP & set(spec.axes) and matrix_axes(spec) is not None


@dataclass(frozen=True)
class Move:
    """One step that brings whole matrices to a device, over one mesh axis.

    If the axis splits a dimension of the matrices, an all-to-all exchanges shards of matrices for
    matrices. Else its devices have the same shards, and each takes a part of the stack.
    """

    axis: str
    devices: int
    dimension: int | None  # of (stack, rows..., columns...); None: the axis splits none


@dataclass(frozen=True)
class MatrixGroup:
    """Matrices of one shape and sharding, which are orthogonalized side by side."""

    axes: Mapping[str, MatrixAxes]  # by path of the array
    shard_shape: tuple[int, ...]  # of one device's shard of a matrix: rows..., columns...
    row_dimensions: int  # number of dimensions that are rows
    count: int  # matrices of which a device has shards
    moves: tuple[Move, ...]

    @property
    def padded_count(self) -> int:
        """Number of matrices that the moves divide evenly among devices."""
        parts = math.prod(move.devices for move in self.moves)
        return math.ceil(self.count / parts) * parts


def group_matrices(
    specs: Mapping[str, ArraySpec], rules: Rules | None, mesh: MeshShape
) -> list[MatrixGroup]:
    """Group matrices by shape and sharding, and return how each group is divided among devices.

    Args:
        specs: ArraySpecs of parameters that are matrices, by path.
        rules: Sharding rules; None without a mesh.
        mesh: The mesh.
    """
    groups: dict[tuple, dict[str, MatrixAxes]] = {}
    counts: dict[tuple, int] = {}
    for path, spec in specs.items():
        axes = matrix_axes(spec)
        assert axes is not None, path
        split = _split(path, spec, rules, mesh)
        shard = [size // mesh.size(names) for size, names in zip(spec.shape, split, strict=True)]
        inner = axes.rows + axes.columns
        stacked_over = frozenset(name for index in axes.stack for name in split[index])
        key = (
            tuple(shard[index] for index in inner),
            len(axes.rows),
            tuple(split[index] for index in inner),
            stacked_over,
        )
        groups.setdefault(key, {})[path] = axes
        counts[key] = counts.get(key, 0) + math.prod(shard[index] for index in axes.stack)
    return [
        MatrixGroup(axes, key[0], key[1], counts[key], _moves(key[2], key[3], counts[key], mesh))
        for key, axes in groups.items()
    ]


def _split(
    path: str, spec: ArraySpec, rules: Rules | None, mesh: MeshShape
) -> tuple[tuple[str, ...], ...]:
    if rules is None:
        return ((),) * len(spec.shape)
    return make_layout(f"optimizer/{path}", replace(spec, role="optimizer"), rules, mesh).split


def _moves(
    split: tuple[tuple[str, ...], ...], stacked_over: frozenset[str], count: int, mesh: MeshShape
) -> tuple[Move, ...]:
    """Return the moves of a group: over all axes that split matrices, then over replicas.

    An axis that comes first in a dimension has the larger blocks, and is joined last. Replicas
    divide the stack only while a device still has more than one matrix.
    """
    moves = [
        Move(axis, mesh.size((axis,)), dimension)
        for dimension, names in enumerate(split, 1)
        for axis in reversed(names)
    ]
    for axis, size in mesh.axes.items():
        parts = math.prod(move.devices for move in moves)
        is_replica = size > 1 and axis not in stacked_over and all(m.axis != axis for m in moves)
        if is_replica and parts < count:
            moves.append(Move(axis, size, None))
    return tuple(moves)
