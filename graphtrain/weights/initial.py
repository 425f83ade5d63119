"""Initial weights of a run: from a converted folder or another run, sharded for a program."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from graphtrain.config.resolve import ResolvedProgram, layer_rows
from graphtrain.config.schema import Model, Run
from graphtrain.errors import WeightsError
from graphtrain.graphs.open_model import open_language_model
from graphtrain.models.shapes import parameter_arrays
from graphtrain.weights.families.family import functional_settings
from graphtrain.weights.open import open_weights
from graphtrain.weights.sources import HF_FILES, WeightSource
from graphtrain.weights.torch_modules import HuggingFaceWeights

if TYPE_CHECKING:
    from lowering.trees import Tree

Index = tuple[slice, ...]
PartReader = Callable[
    [str, tuple[int, ...], Index], np.ndarray
]  # reads a part, by path and unsharded shape
ArrayLoader = Callable[["Tree", PartReader], "Tree"]  # loads the described arrays onto the devices


def open_initial_weights(model: Model, run: Run) -> WeightSource | HuggingFaceWeights | None:
    """Open the weights of `model` that run.init_from names, or return None if it is not set.

    Raises:
        WeightsError: the weights are incomplete, or do not match program.model.
    """
    if run.init_from is None:
        return None
    directory = Path(run.init_from)
    if open_language_model(model).uses_module_names:
        return HuggingFaceWeights(directory)
    weights = open_weights(directory)
    theirs, mine = weights.model, model
    if mine.vocab < theirs.vocab:
        raise WeightsError(
            f"run.init_from: {directory} has a vocabulary of {theirs.vocab}, but "
            "program.model.vocab "
            f"= {mine.vocab} is smaller; set it to at least {theirs.vocab}"
        )
    theirs, mine = functional_settings(replace(theirs, vocab=mine.vocab)), functional_settings(mine)
    differ = [
        f"{field.name} = {getattr(mine, field.name)} (instead of {getattr(theirs, field.name)})"
        for field in fields(mine)
        if getattr(mine, field.name) != getattr(theirs, field.name)
    ]
    if differ:
        raise WeightsError(
            f"run.init_from: {directory} contains another model than [program.model], which has "
            f'{", ".join(differ)}; to use its settings, set preset = "{directory}/model.toml"'
        )
    return weights


def load_initial_parameters(
    weights: WeightSource | HuggingFaceWeights,
    program: ResolvedProgram,
    described: Tree,
    fill: ArrayLoader,
) -> Tree:
    """Load a program's parameters onto its devices; each host reads only its devices' shards."""
    if isinstance(weights, HuggingFaceWeights):
        return weights.parameters(described, fill, program.stages)
    return fill(described, part_reader(weights, program))


def part_reader(weights: WeightSource, program: ResolvedProgram) -> PartReader:
    """Return a function that reads parts of the weights in a program's layout.

    Layers are in the order of the program's pipeline stages. Padding rows of stages and of the
    vocabulary are zeros.
    """
    layers = np.array([-1 if layer is None else layer for layer in layer_rows(program)])
    arrays = parameter_arrays(weights.model)

    def read(path: str, shape: tuple[int, ...], index: Index) -> np.ndarray:
        own = arrays[path].shape
        index = tuple(slice(*one.indices(size)[:2]) for one, size in zip(index, shape, strict=True))
        if not path.startswith("layers/"):
            return _part(weights, path, None, own, index)
        leading = (
            len(shape) - len(own) + 1
        )  # a pipeline may have an axis of virtual stages before that of rows
        wanted = layers.reshape(shape[:leading])[index[:leading]]
        parts = [_part(weights, path, int(n), own[1:], index[leading:]) for n in wanted.ravel()]
        return np.stack(parts).reshape(*wanted.shape, *parts[0].shape)

    return read


def _part(
    weights: WeightSource, path: str, layer: int | None, shape: tuple[int, ...], index: Index
) -> np.ndarray:
    """Return a part in float32; zeros outside the array, and for the padding layer -1."""
    part = np.zeros([one.stop - one.start for one in index], np.float32)
    if layer == -1:
        return part
    inside = tuple(
        slice(min(one.start, size), min(one.stop, size))
        for one, size in zip(index, shape, strict=True)
    )
    found = weights.part(path, layer, inside)
    part[tuple(slice(size) for size in found.shape)] = found
    return part


def copy_hf_files_to_run(weights: WeightSource | HuggingFaceWeights, directory: Path) -> None:
    """Copy config.json, tokenizer etc. of the weights into a run directory, for later export."""
    if isinstance(weights, HuggingFaceWeights):
        from graphtrain.weights.convert import copy_hf_files

        copy_hf_files(weights.side, directory / HF_FILES)
    elif weights.side.is_dir():
        shutil.copytree(weights.side, directory / HF_FILES, dirs_exist_ok=True)
