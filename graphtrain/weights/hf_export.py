"""Conversion of a converted folder or a run to a folder that transformers can load."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from graphtrain.checkpoints.output_directory import create_directory
from graphtrain.config.hf_quantization import QUANTIZATION_CONFIG
from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema import Model
from graphtrain.errors import WeightsError
from graphtrain.weights.conversion import ConversionSummary, Progress, summarize
from graphtrain.weights.exportable import export_obstacle
from graphtrain.weights.exported_arrays import (
    exported_dtype,
    remove_padding,
    tensor_shapes,
    with_unpadded_vocab,
)
from graphtrain.weights.families import (
    Family,
    family_of_config,
    family_of_model,
    functional_settings,
)
from graphtrain.weights.families.family import LayerWeights, to_hugging_face
from graphtrain.weights.files import DTYPE_CODES, numpy_dtype_of
from graphtrain.weights.finite import ExportedValues
from graphtrain.weights.hf_files import copy_exported_hf_files, read_config
from graphtrain.weights.hf_record import verify_hf_files
from graphtrain.weights.imported_run import run_of_imported_model
from graphtrain.weights.open import open_weights
from graphtrain.weights.sources import HF_FILES, WeightSource, checkpoint_step
from graphtrain.weights.tokenizer import describe_tokenizer
from graphtrain.weights.writer import MAX_FILE_BYTES, SafetensorsWriter

Arrays = dict[str, tuple[np.dtype, tuple[int, ...]]]  # dtype and shape of each tensor, by name


@dataclass(frozen=True)
class ExportedFiles:
    """The form of exported weights."""

    dtype: str | None = None  # None: as of the initial weights, or float32
    max_file_bytes: int = MAX_FILE_BYTES  # of one file; several have an index

    @property
    def numpy_dtype(self) -> np.dtype | None:
        return None if self.dtype is None else numpy_dtype_of("--dtype", self.dtype)


def export_hugging_face(
    source: Path,
    destination: Path,
    progress: Progress,
    step: int | None = None,
    *,
    averaged: bool = False,
    files: ExportedFiles | None = None,
    more_files: Mapping[str, bytes] | None = None,
) -> ConversionSummary:
    """Convert a converted folder or a run into a folder that transformers can load.

    The family, the dtypes, the unpadded vocabulary and all files other than weights come from the
    original Hugging Face folder. A model trained from scratch gets the first family that can
    express it, in float32.

    Args:
        source: converted folder, or directory of a run.
        destination: folder to create.
        progress: called for each group of arrays.
        step: step of the run's checkpoint; None for the last.
        averaged: whether to export the moving average of the run's weights.
        files: dtype and size of the written files; by default those of ExportedFiles.
        more_files: other files of the folder, by name.

    Raises:
        WeightsError: no family can express the model, the source is incomplete, or it has no
            moving average.
    """
    files, more_files = files or ExportedFiles(), more_files or {}
    if (run := run_of_imported_model(source)) is not None:
        if averaged:
            raise WeightsError(
                f"{source}: --averaged does not read runs of PyTorch models; make a run of the "
                "averaged weights first (graphtrain convert reshard --averaged)"
            )
        return _export_torch_model(run, source, destination, progress, step, files, more_files)
    weights = open_weights(source, step, averaged=averaged)
    config = _original_config(weights)
    model = with_unpadded_vocab(weights.model, config)
    family = family_of_config(config) if config else _family_of(model)
    all_layer_weights = list(family.weights(model))
    default_dtype = np.dtype(_config_dtype(config))
    arrays = _exported_arrays(all_layer_weights, weights, model, files.numpy_dtype, default_dtype)
    values = ExportedValues()
    with create_directory(destination) as directory:
        writer = SafetensorsWriter(directory, arrays, files.max_file_bytes)
        for num_done, layer_weights in enumerate(all_layer_weights):
            progress(num_done, len(all_layer_weights))
            for name, tensor in _tensors(layer_weights, weights, model):
                writer.write(name, values.cast(name, tensor, arrays[name][0]))
        writer.close()
        if weights.side.is_dir():
            verify_hf_files(weights.directory)
            copy_exported_hf_files(weights.side, directory)
        special = describe_tokenizer(directory, family.model_type) if config is None else {}
        _write_config(directory, family, model, config, arrays, special)
        if files.dtype is not None:
            _write_dtype(directory / "config.json", files.dtype)
        _write_files(directory, more_files)
    values.report(source)
    progress(len(all_layer_weights), len(all_layer_weights))
    return summarize(family, model, arrays)


def _original_config(weights: WeightSource) -> dict[str, Any] | None:
    """Return the config.json of the original folder; None for a model trained from scratch.

    The folder of such a model may contain only a tokenizer.
    """
    if not (weights.side / "config.json").is_file():
        return None
    config = read_config(weights.side)
    config.pop(QUANTIZATION_CONFIG, None)  # of the original weights
    return config


def _exported_arrays(
    all_layer_weights: Sequence[LayerWeights],
    weights: WeightSource,
    model: Model,
    chosen: np.dtype | None,
    default: np.dtype,
) -> Arrays:
    """Return dtype and shape of every tensor to write, by name."""
    arrays = {}
    for layer_weights in all_layer_weights:
        dtype = exported_dtype(layer_weights.row.paths[0], weights, chosen, default)
        for name, shape in tensor_shapes(layer_weights, model):
            arrays[name] = dtype, shape
    return arrays


def _tensors(
    layer_weights: LayerWeights, weights: WeightSource, model: Model
) -> Iterator[tuple[str, np.ndarray]]:
    """Read one row of weights; yield names and values of its tensors, without padding."""
    paths = layer_weights.row.paths
    arrays = [
        remove_padding(path, array, model)
        for path, array in zip(paths, weights.read(paths, layer_weights.layer), strict=True)
    ]
    yield from to_hugging_face(layer_weights, arrays, model)


def _family_of(model: Model) -> Family:
    """Return the first family that has a model.

    Raises:
        WeightsError: none has; names the settings to change.
    """
    if (obstacle := export_obstacle(model)) is not None:
        raise WeightsError(f"{obstacle}; train with these settings to export the model")
    return family_of_model(model)


def _export_torch_model(
    program: ResolvedProgram,
    source: Path,
    destination: Path,
    progress: Progress,
    step: int | None,
    files: ExportedFiles,
    more_files: Mapping[str, bytes],
) -> ConversionSummary:
    from graphtrain.weights.imported_export import export

    resolved_step = checkpoint_step(source, step)
    with create_directory(destination) as directory:
        if (source / HF_FILES).is_dir():
            verify_hf_files(source)
            copy_exported_hf_files(source / HF_FILES, directory)
        model_type, num_parameters, num_arrays = export(
            program,
            source,
            resolved_step,
            directory,
            progress,
            files.dtype or "float32",
            files.max_file_bytes,
        )
        _write_files(directory, more_files)
    return ConversionSummary(model_type, num_parameters, num_arrays, files.dtype or "float32")


def _write_files(directory: Path, contents: Mapping[str, bytes]) -> None:
    for name, content in contents.items():
        (directory / name).write_bytes(content)


def _config_dtype(config: dict[str, Any] | None) -> str:
    settings = config or {}
    dtype_name = str(settings.get("dtype") or settings.get("torch_dtype"))
    return dtype_name if dtype_name in {str(dtype) for dtype in DTYPE_CODES} else "float32"


def _write_config(
    directory: Path,
    family: Family,
    model: Model,
    config: dict[str, Any] | None,
    arrays: Arrays,
    special: dict[str, Any],
) -> None:
    """Write config.json, unless the copied one already describes this model.

    Without a copied one it has the ids of the tokenizer's special tokens.
    """
    if config is not None and functional_settings(
        family.model_from_config(config)
    ) == functional_settings(model):
        return
    main_dtype = Counter(dtype for dtype, _ in arrays.values()).most_common(1)[0][0]
    exported_config = (
        (config or special) | family.config_from_model(model) | {"torch_dtype": str(main_dtype)}
    )
    (directory / "config.json").write_text(json.dumps(exported_config, indent=2) + "\n")


def _write_dtype(path: Path, dtype: str) -> None:
    """State the dtype of exported weights in their config.json, under the name it has there."""
    config = json.loads(path.read_text())
    name = "torch_dtype" if "torch_dtype" in config else "dtype"
    path.write_text(json.dumps(config | {name: dtype}, indent=2) + "\n")
