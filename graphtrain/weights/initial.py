"""Initial weights of a run: from a converted folder or another run, sharded for a program."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from graphtrain.config.resolve import ResolvedProgram, layer_rows
from graphtrain.config.schema import Model, Run, TorchModel
from graphtrain.errors import WeightsError
from graphtrain.graphs.open_model import open_language_model
from graphtrain.models.shapes import parameter_arrays
from graphtrain.weights.families.family import functional_settings
from graphtrain.weights.finite import require_finite
from graphtrain.weights.imported_folder import HuggingFaceWeights
from graphtrain.weights.open import open_weights
from graphtrain.weights.padded_parts import padded_part, zeros_of
from graphtrain.weights.sources import HF_FILES, WeightSource, stored_name

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
        return HuggingFaceWeights(directory, model if isinstance(model, TorchModel) else None)
    weights = open_weights(directory)
    source_model, run_model = weights.model, model
    if run_model.vocab < source_model.vocab:
        raise WeightsError(
            f"run.init_from: {directory} has a vocabulary of {source_model.vocab}, but "
            "program.model.vocab "
            f"= {run_model.vocab} is smaller; set it to at least {source_model.vocab}"
        )
    source_model, run_model = (
        functional_settings(
            replace(source_model, vocab=run_model.vocab, vocab_padding=run_model.vocab_padding)
        ),
        functional_settings(run_model),
    )
    differences = [
        f"{field.name} = {getattr(run_model, field.name)} "
        f"(instead of {getattr(source_model, field.name)})"
        for field in fields(run_model)
        if getattr(run_model, field.name) != getattr(source_model, field.name)
    ]
    if differences:
        raise WeightsError(
            f"run.init_from: {directory} contains another model than [program.model], which has "
            f'{", ".join(differences)}; to use its settings, set preset = "{directory}/model.toml"'
        )
    if model.ahead_layers > weights.model.ahead_layers:
        raise WeightsError(
            f"run.init_from: {directory} has no module of multi-token prediction, and "
            f"program.model.mtp_loss_weight = {model.mtp_loss_weight} trains one; remove "
            "mtp_loss_weight, or name weights with the module"
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
        unpadded_shape = arrays[path].shape
        index = tuple(
            slice(*axis_slice.indices(size)[:2])
            for axis_slice, size in zip(index, shape, strict=True)
        )
        if not path.startswith("layers/"):
            return _part(weights, path, None, unpadded_shape, index)
        # A pipeline may have an axis of virtual stages before that of rows.
        leading = len(shape) - len(unpadded_shape) + 1
        requested_layers = layers.reshape(shape[:leading])[index[:leading]]
        parts = [
            _part(weights, path, int(layer), unpadded_shape[1:], index[leading:])
            for layer in requested_layers.ravel()
        ]
        return np.stack(parts).reshape(*requested_layers.shape, *parts[0].shape)

    return read


def _part(
    weights: WeightSource, path: str, layer: int | None, shape: tuple[int, ...], index: Index
) -> np.ndarray:
    """Return a part in float32; zeros outside the array, and for the padding layer -1."""
    if layer == -1:
        return zeros_of(index)
    values = padded_part(lambda inside: weights.part(path, layer, inside), shape, index)
    return require_finite(values, stored_name(path, layer), weights.directory)


def copy_hf_files_to_run(weights: WeightSource | HuggingFaceWeights, directory: Path) -> None:
    """Copy config.json, tokenizer etc. of the weights into a run directory, for later export."""
    if isinstance(weights, HuggingFaceWeights):
        from graphtrain.weights.hf_files import copy_hf_files

        copy_hf_files(weights.side, directory / HF_FILES)
    elif weights.side.is_dir():
        from graphtrain.weights.hf_record import verify_hf_files

        verify_hf_files(weights.directory)
        shutil.copytree(weights.side, directory / HF_FILES, dirs_exist_ok=True)
