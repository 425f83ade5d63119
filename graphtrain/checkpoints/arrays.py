"""Arrays of a checkpoint: their shapes, and their contents in parts or whole."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from graphtrain.checkpoints import private_orbax
from graphtrain.checkpoints.layer_rows import Index
from graphtrain.checkpoints.storage_errors import checkpoint_errors
from graphtrain.errors import TrainingError
from lowering.trees import Tree, flatten


def describe_arrays(tree: Tree) -> dict[str, list[Any]]:
    """Return the shape and dtype of each array by its path, as a checkpoint records them."""
    return {path: [list(leaf.shape), str(leaf.dtype)] for path, leaf in flatten(tree).items()}


def check_same_arrays(
    checkpoint_path: Path, saved: Mapping[str, Any], expected: Mapping[str, Any]
) -> None:
    """Check the arrays of a checkpoint against those of a program, each from describe_arrays.

    If the program has parameters alone, as to generate, they need no module of multi-token
    prediction, which only training uses.

    Raises:
        TrainingError: an array differs; names it with both shapes.
    """
    roots = {path.partition("/")[0] for path in expected}
    saved = {path: array for path, array in saved.items() if path.partition("/")[0] in roots}
    if roots == {"parameters"} and not any(map(_is_ahead, expected)):
        saved = {path: array for path, array in saved.items() if not _is_ahead(path)}
    for path in saved | dict(expected):
        if saved.get(path) != expected.get(path):
            raise TrainingError(
                f"{checkpoint_path} was saved by another program: {path} is "
                f"{_say(saved.get(path))} in the checkpoint and {_say(expected.get(path))} in this "
                "program; set run.directory to a new directory, or change [program] back"
            )


def _is_ahead(path: str) -> bool:
    return path.startswith("parameters/ahead/")


def _say(array: list[Any] | None) -> str:
    return "absent" if array is None else f"{array[1]} {array[0]}"


def part_reader(where: Path, path: str) -> Callable[[Index], np.ndarray]:
    """Return a function that reads parts of one array of a checkpoint, and only those parts.

    Args:
        where: Directory of one checkpoint.
        path: Path of the array in the state.

    Raises:
        ValueError: there is no such array, or it is damaged.
    """
    array = private_orbax.open_array(where, path)
    return lambda index: np.asarray(array[index].read().result())


def array_shape(checkpoint_path: Path, path: str) -> tuple[int, ...]:
    """Return the shape of one array of a checkpoint, without its contents.

    Raises:
        TrainingError: there is no such array, or it is damaged.
    """
    try:
        return tuple(private_orbax.open_array(checkpoint_path, path).shape)
    except ValueError as error:
        reason = str(error).partition(" [tensorstore_spec")[0]
        raise TrainingError(f"its array {path} is missing or damaged: {reason}") from error


def restore_array(directory: Path, step: int, path: str) -> np.ndarray:
    """Load one complete array of a checkpoint's state, by its path, into host memory.

    Raises:
        TrainingError: the array cannot be read.
    """
    checkpoint_path = directory / str(step)
    with checkpoint_errors(checkpoint_path, "read"):
        return part_reader(checkpoint_path, path)(())
