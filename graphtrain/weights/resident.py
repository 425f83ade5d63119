"""Weights of a run that are on the devices, in the layout of another program of the same model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

import lowering
from graphtrain.checkpoints.layer_order import Shape, layer_order_of
from graphtrain.checkpoints.layer_rows import (
    Index,
    StackedArray,
    read_reordered_part,
    stacked_pairs,
)
from graphtrain.config.resolve import ResolvedProgram, layer_rows
from graphtrain.config.schema import Model, Program
from graphtrain.errors import TrainingError
from graphtrain.models.lora.trainable import trained_arrays
from graphtrain.weights.initial import load_initial_parameters
from graphtrain.weights.merged import MergedWeights
from graphtrain.weights.sources import HF_FILES, WeightSource
from lowering.trees import Tree, flatten, unflatten
from lowering.xla import distributed
from sharding_rules.pipeline import LayerRows


def relaid_parameters(
    parameters: Tree,
    trained: ResolvedProgram,
    base: WeightSource | None,
    program: ResolvedProgram,
    described: Tree,
) -> Tree:
    """Return trained parameters as another program needs them; adapters are merged.

    What differs in its sharding or in the order of its layers is copied through host memory, one
    array at a time, if all devices are of this process.

    Args:
        parameters: Trained parameters, on the devices.
        trained: The program that trains them.
        base: Weights that its adapter belongs to.
        program: The other program.
        described: Shapes, dtypes and shardings of its parameters.

    Raises:
        TrainingError: parameters would have to be copied, and other processes have parts of them;
            or layers are in another order that no shape tells.
    """
    if trained.adapter is not None:
        _check_alone("to merge the adapter")
        assert base is not None
        merged = MergedWeights(_ResidentAdapter(trained, parameters, base.directory), base)
        fill = lowering.backend(program.target).from_shards
        return load_initial_parameters(merged, program, described, fill)
    arrays, leaves = flatten(parameters), flatten(described)
    order = layer_order_of(program)
    shapes = {path: (arrays[path].shape, tuple(like.shape)) for path, like in leaves.items()}
    rows = order.reordering_from(layer_order_of(trained).rows, shapes.values())
    pairs = _orders(shapes, rows, by_shape=order.by_shape) if rows is not None else {}
    same = {
        path
        for path, like in leaves.items()
        if rows is None and arrays[path].sharding.is_equivalent_to(like.sharding, len(like.shape))
    }

    @lru_cache(maxsize=1)
    def on_host(path: str) -> np.ndarray:
        return np.asarray(arrays[path])

    def read(path: str, shape: tuple[int, ...], index: Index) -> np.ndarray:
        array = on_host(path)
        if rows is None:
            return array[index]
        stored, wanted = pairs[path]
        return read_reordered_part(wanted, stored, index, lambda part: array[part], array.dtype)

    others = {path: like for path, like in leaves.items() if path not in same}
    moved: Tree = {}
    if others:
        _check_alone(f"to move {next(iter(others))}")
        moved = flatten(lowering.backend(program.target).from_shards(unflatten(others), read))
    return unflatten({path: arrays[path] if path in same else moved[path] for path in leaves})


def _check_alone(purpose: str) -> None:
    if distributed.count() > 1:
        raise TrainingError(
            f"{purpose}, all devices have to be of one process, and this run has "
            f"{distributed.count()}; evaluate its checkpoints instead"
        )


def _orders(
    shapes: Mapping[str, tuple[Shape, Shape]],
    rows: tuple[LayerRows, LayerRows],
    *,
    by_shape: bool,
) -> dict[str, tuple[StackedArray, StackedArray]]:
    """Return each array in the order of its layers of both programs."""
    is_stacked = False if by_shape else None
    pairs = {
        path: (
            StackedArray(path, first, rows[0], is_stacked),
            StackedArray(path, second, rows[1], is_stacked),
        )
        for path, (first, second) in shapes.items()
    }
    if not by_shape:
        return pairs
    found = stacked_pairs(shapes, rows)
    if not found:
        raise TrainingError(
            f"the run stacks its layers in as many rows as the program that takes its weights, but "
            f"in another order: {rows[0]} instead of {rows[1]}; use the same "
            "pipeline.layers_per_stage for both"
        )
    return pairs | found


class _ResidentAdapter:
    """Adapter that is being trained, as a checkpoint of it would be read."""

    def __init__(self, trained: ResolvedProgram, parameters: Tree, directory: Path) -> None:
        self.program: Program = trained.settings
        self.model: Model = trained.model
        self.directory, self.side = directory, directory / HF_FILES
        self._arrays = flatten(parameters)
        self._row_of = {
            layer: row for row, layer in enumerate(layer_rows(trained)) if layer is not None
        }

    @property
    def files(self) -> list[Path]:
        return []

    def read(self, paths: Sequence[str], layer: int | None) -> list[np.ndarray]:
        arrays = [self._natural(path) for path in paths]
        return arrays if layer is None else [array[self._row_of[layer]] for array in arrays]

    def _natural(self, path: str) -> np.ndarray:
        array = np.asarray(self._arrays[path])
        if not path.startswith("layers/"):
            return array
        inner = trained_arrays(self.program)[path].shape[1:]
        return array.reshape(-1, *inner)  # merge a pipeline's axis of virtual stages
