"""What a run starts from: weights converted, or those of another run, put where a program wants."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from graphtrain.config.resolve import rows_of_layers, stages_of
from graphtrain.config.schema import Config, Program, is_imported
from graphtrain.errors import WeightsError
from graphtrain.models.shapes import parameter_arrays
from graphtrain.weights.families.family import mathematics
from graphtrain.weights.sources import SIDE, Source, open_source
from graphtrain.weights.torch_modules import ModuleWeights

if TYPE_CHECKING:
    from lowering.trees import Tree

Index = tuple[slice, ...]
Read = Callable[[str, tuple[int, ...], Index], np.ndarray]  # by path and whole shape, a part
Fill = Callable[["Tree", Read], "Tree"]  # of described arrays, those on the devices


def open_initial(config: Config) -> Source | ModuleWeights | None:
    """The weights of run.initial, if it is set.

    Raises:
        WeightsError: they are not whole, or of another model than program.model.
    """
    if config.run.initial is None:
        return None
    directory = Path(config.run.initial)
    if is_imported(config.program.model):
        return ModuleWeights(directory)
    weights = open_source(directory)
    theirs, mine = weights.model, config.program.model
    if mine.vocab < theirs.vocab:
        raise WeightsError(
            f"run.initial: {directory} has a vocabulary of {theirs.vocab} and program.model.vocab "
            f"= {mine.vocab} is smaller; set at least {theirs.vocab}"
        )
    theirs, mine = mathematics(replace(theirs, vocab=mine.vocab)), mathematics(mine)
    differ = [
        f"{field.name} = {getattr(mine, field.name)} (there {getattr(theirs, field.name)})"
        for field in fields(mine)
        if getattr(mine, field.name) != getattr(theirs, field.name)
    ]
    if differ:
        raise WeightsError(
            f"run.initial: {directory} holds another model than [program.model], which has "
            f'{", ".join(differ)}; preset = "{directory}/model.toml" takes its settings'
        )
    return weights


def start_parameters(
    weights: Source | ModuleWeights, program: Program, described: Tree, fill: Fill
) -> Tree:
    """The parameters of a program on its devices; only parts that a device holds are read."""
    if isinstance(weights, ModuleWeights):
        return weights.parameters(described, fill, stages_of(program))
    return fill(described, reader(weights, program))


def reader(weights: Source, program: Program) -> Read:
    """Parts of weights as a program stores them.

    Layers go where the program's stages have them; rows of zeros fill up stages and vocabulary.
    """
    layers = np.array([-1 if layer is None else layer for layer in rows_of_layers(program)])
    arrays = parameter_arrays(weights.model)

    def read(path: str, shape: tuple[int, ...], index: Index) -> np.ndarray:
        own = arrays[path].shape
        index = tuple(slice(*one.indices(size)[:2]) for one, size in zip(index, shape, strict=True))
        if not path.startswith("layers/"):
            return _part(weights, path, None, own, index)
        leading = len(shape) - len(own) + 1  # the rounds of a pipeline may be in front of its rows
        wanted = layers.reshape(shape[:leading])[index[:leading]]
        parts = [_part(weights, path, int(n), own[1:], index[leading:]) for n in wanted.ravel()]
        return np.stack(parts).reshape(*wanted.shape, *parts[0].shape)

    return read


def _part(
    weights: Source, path: str, layer: int | None, shape: tuple[int, ...], index: Index
) -> np.ndarray:
    """A part in float32, with zeros where it reaches past the array, or of the layer -1."""
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


def keep_side(weights: Source | ModuleWeights, directory: Path) -> None:
    """Copy configuration and tokenizer of the weights into a run's directory, for the way back."""
    if isinstance(weights, ModuleWeights):
        from graphtrain.weights.convert import copy_side

        copy_side(weights.side, directory / SIDE)
    elif weights.side.is_dir():
        shutil.copytree(weights.side, directory / SIDE, dirs_exist_ok=True)
