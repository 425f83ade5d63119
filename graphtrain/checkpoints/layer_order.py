"""Order in which a program stacks its layers, and reading a checkpoint that has another."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import lowering
from graphtrain.checkpoints.arrays import check_same_arrays, part_reader
from graphtrain.checkpoints.info import CheckpointInfo
from graphtrain.checkpoints.layer_rows import (
    Index,
    StackedArray,
    read_reordered_part,
    stacked_pairs,
)
from graphtrain.config.resolve import ResolvedProgram
from graphtrain.errors import TrainingError
from graphtrain.graphs.open_model import open_language_model
from lowering.trees import Tree, flatten
from sharding_rules.pipeline import LayerRows

Shape = tuple[int, ...]


@dataclass(frozen=True)
class LayerOrder:
    """Order of layer rows in a program's stacked arrays, and its backend's array loader."""

    rows: LayerRows | None  # layer in each row; None for an imported model without a pipeline
    load_arrays: Callable[[Tree, Callable[[str, tuple[int, ...], Any], np.ndarray]], Tree]
    by_shape: bool = False  # recognize stacked arrays by their shape, not by their path

    def reordering_from(
        self, kept: LayerRows | None, shapes: Iterable[tuple[Shape, Shape]]
    ) -> tuple[LayerRows, LayerRows] | None:
        """Return the rows of the checkpoint and of this program, or None if they are equal.

        Args:
            kept: Layer in each row of the checkpoint.
            shapes: Shape of each array in the checkpoint and in this program. Rows in the same
                order may have an axis of virtual stages in one of them.
        """
        program_rows = self.rows
        if self.by_shape:
            program_rows, kept = (
                program_rows or _without_pipeline(kept),
                kept or _without_pipeline(program_rows),
            )
        if program_rows is None or kept is None:
            return None
        is_reshaped = any(
            one != other and math.prod(one) == math.prod(other) for one, other in shapes
        )
        return (kept, program_rows) if program_rows != kept or is_reshaped else None


def shape_pairs(saved: Mapping[str, Any], described: Tree) -> Iterator[tuple[Shape, Shape]]:
    """Yield the shapes of the arrays that a checkpoint and a program both have.

    Args:
        saved: Shape and dtype of the arrays of the checkpoint, by path.
        described: Tree of the arrays of the program.
    """
    for path, leaf in flatten(described).items():
        if path in saved:
            yield tuple(saved[path][0]), tuple(leaf.shape)


def _without_pipeline(rows: LayerRows | None) -> LayerRows | None:
    """Return the rows of the same layers without a pipeline."""
    return rows and tuple(range(sum(layer is not None for layer in rows)))


def layer_order_of(program: ResolvedProgram) -> LayerOrder:
    """Return the order in which a program stacks its layers."""
    target, stages = program.target, program.stages
    model, rows = open_language_model(program.model), None
    if stages is not None:
        rows = stages.rows
    elif model.layer_count is not None:
        rows = tuple(range(model.layer_count))
    return LayerOrder(
        rows,
        lambda described, read: lowering.backend(target).from_shards(described, read),
        by_shape=model.uses_module_names,
    )


def load_reordered(
    checkpoint_path: Path,
    info: CheckpointInfo,
    described: Tree,
    arrangement: LayerOrder,
    rows: LayerRows,
    program_rows: LayerRows,
    open_array: Callable[[str], Callable[[Index], np.ndarray]] | None = None,
) -> Tree:
    """Load the arrays described from a checkpoint that stacks its layers in another order.

    `open_array` returns what reads parts of an array by its path; None for those of Orbax.
    """
    open_array = open_array or partial(part_reader, checkpoint_path)
    leaves = flatten(described)
    shapes = {path: tuple(shape) for path, (shape, _) in info.arrays.items()}
    is_stacked = False if arrangement.by_shape else None
    saved_arrays = {
        path: StackedArray(path, shape, rows, is_stacked) for path, shape in shapes.items()
    }
    program_arrays = {
        path: StackedArray(path, tuple(leaf.shape), program_rows, is_stacked)
        for path, leaf in leaves.items()
    }
    if arrangement.by_shape:
        both = saved_arrays.keys() & program_arrays.keys()
        pairs = stacked_pairs(
            {path: (saved_arrays[path].shape, program_arrays[path].shape) for path in both},
            (rows, program_rows),
        )
        if not pairs:
            raise TrainingError(
                f"{checkpoint_path} stacks its layers in as many rows, but in another order: "
                f"{rows} instead of {program_rows}; resume with the pipeline.layers_per_stage it "
                "was saved with"
            )
        saved_arrays |= {path: saved for path, (saved, _) in pairs.items()}
        program_arrays |= {path: target for path, (_, target) in pairs.items()}
    check_same_arrays(
        checkpoint_path,
        {
            path: [list(array.shape_without_pipeline), info.arrays[path][1]]
            for path, array in saved_arrays.items()
        },
        {
            path: [list(array.shape_without_pipeline), str(leaves[path].dtype)]
            for path, array in program_arrays.items()
        },
    )

    def read(path: str, shape: tuple[int, ...], index: Index) -> np.ndarray:
        dtype = np.dtype(leaves[path].dtype)
        return read_reordered_part(
            program_arrays[path],
            saved_arrays[path],
            index,
            open_array(path),
            dtype,
        )

    return arrangement.load_arrays(described, read)
