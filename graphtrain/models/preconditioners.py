"""Arrays of two-sided preconditioners (SOAP), by the names of array axes; imports no JAX."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from graphtrain.models.matrices import MatrixGroup, matrix_axes
from sharding_rules.arrays import ArraySpec


def preconditioner_specs(spec: ArraySpec, largest: int) -> dict[str, ArraySpec]:
    """Return the square matrices of the sides "left" and "right" of a matrix, or stack of them.

    They are sharded as the matrix is: over the axes of its rows, and those of its columns. A side
    longer than `largest` has none.

    Args:
        spec: An array that is a matrix, or a stack of them.
        largest: Length of the longest side that has a preconditioner.
    """
    axes = matrix_axes(spec)
    assert axes is not None, spec.axes
    inner = spec.axes[axes.rows[0]], spec.axes[axes.columns[0]]
    specs = {}
    for side, dimensions in (("left", axes.rows), ("right", axes.columns)):
        size = math.prod(spec.shape[index] for index in dimensions)
        if size <= largest:
            shape = (*(spec.shape[index] for index in axes.stack), size, size)
            names = (*(spec.axes[index] for index in axes.stack), *inner)
            specs[side] = replace(spec, shape=shape, axes=names)
    return specs


def square_group(
    group: MatrixGroup, specs: Mapping[str, ArraySpec], split: Sequence[tuple[str, ...]]
) -> MatrixGroup:
    """Return the group of the preconditioners of one side of a group's matrices.

    Every mesh axis moves them as it moves the matrices, so that both arrive at the same device.

    Args:
        group: Group of matrices.
        specs: ArraySpecs of the preconditioners, by path of the matrices.
        split: Mesh axes that split each dimension of a preconditioner.
    """
    axes = {path: axes for path in group.axes if (axes := matrix_axes(specs[path])) is not None}
    dimensions = {name: index for index, names in enumerate(split[-2:], 1) for name in names}
    assert dimensions.keys() <= {move.axis for move in group.moves}, (split, group)
    devices = {move.axis: move.devices for move in group.moves}
    size = specs[next(iter(axes))].shape[-1]
    return replace(
        group,
        axes=axes,
        shard_shape=tuple(
            size // math.prod(devices[name] for name in names) for names in split[-2:]
        ),
        row_dimensions=1,
        moves=tuple(replace(move, dimension=dimensions.get(move.axis)) for move in group.moves),
    )
