"""Loading a checkpoint that stores blocks one by one into a program that stacks them.

Imported models whose blocks do not repeat evenly were saved so before they ran in scans: the arrays
"model/layers/3/mlp/up_proj/weight" and so on are rows of "model/layers/3-60/mlp/up_proj/weight".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from graphtrain.checkpoints.arrays import check_same_arrays, describe_arrays
from graphtrain.checkpoints.layer_rows import Index
from graphtrain.torch_frontend.block_ranges import blocks_of
from lowering.trees import Tree, flatten

OpenArray = Callable[[str], Callable[[Index], np.ndarray]]
LoadArrays = Callable[[Tree, Callable[[str, tuple[int, ...], Any], np.ndarray]], Tree]


def rows_by_path(saved: Mapping[str, Any], described: Tree) -> dict[str, list[str]]:
    """Return the arrays of the checkpoint that are the rows of an array of the program, by path.

    Args:
        saved: Shape and dtype of the arrays of the checkpoint, by path.
        described: Tree of the arrays of the program.
    """
    found = {}
    for path in flatten(described):
        rows = _rows(path)
        if path not in saved and rows and all(row in saved for row in rows):
            found[path] = rows
    return found


def _rows(path: str) -> list[str]:
    """Return the paths of the rows of an array that stacks blocks; empty for another."""
    components = path.split("/")
    for place, component in enumerate(components):
        if (blocks := blocks_of(component)) is not None:
            before, after = components[:place], components[place + 1 :]
            return ["/".join([*before, str(number), *after]) for number in blocks]
    return []


def load_joined(
    checkpoint_path: Path,
    saved: Mapping[str, Any],
    described: Tree,
    rows: Mapping[str, list[str]],
    load_arrays: LoadArrays,
    open_array: OpenArray,
) -> Tree:
    """Load the arrays described, of which some are stacked from rows in the checkpoint.

    Args:
        checkpoint_path: Directory of the checkpoint.
        saved: Shape and dtype of the arrays of the checkpoint, by path.
        described: Tree of the arrays of the program.
        rows: As from rows_by_path.
        load_arrays: Builds arrays from a function that reads a part of one.
        open_array: Returns a function that reads parts of an array of the checkpoint.

    Raises:
        TrainingError: the checkpoint contains other arrays.
    """
    row_paths = {row for inside in rows.values() for row in inside}
    joined = {path: array for path, array in saved.items() if path not in row_paths}
    for path, inside in rows.items():
        shapes = {(tuple(shape), dtype) for shape, dtype in (saved[row] for row in inside)}
        if len(shapes) == 1:  # else the check below names the array
            ((shape, dtype),) = shapes
            joined[path] = [[len(inside), *shape], dtype]
    check_same_arrays(checkpoint_path, joined, describe_arrays(described))

    def read(path: str, shape: tuple[int, ...], index: Index) -> np.ndarray:
        if path not in rows:
            return open_array(path)(index)
        first, *inner = index
        return np.stack([open_array(row)(tuple(inner)) for row in rows[path][first]])

    return load_arrays(described, read)
