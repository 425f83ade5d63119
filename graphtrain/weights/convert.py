"""Conversion between Hugging Face folders and the decoder's arrays, one array at a time."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from graphtrain.checkpoints.output_directory import create_directory
from graphtrain.config.hf_config import read_config_json
from graphtrain.config.hf_quantization import QUANTIZATION_CONFIG
from graphtrain.config.render import render_model
from graphtrain.config.resolve import ResolvedProgram, resolve
from graphtrain.config.schema import FlaxModel, Model
from graphtrain.data.tokenizers.consistency import check_tokenizer, vocabulary_problem
from graphtrain.errors import DataError, WeightsError
from graphtrain.graphs.open_model import open_language_model
from graphtrain.models.flops import parameter_count
from graphtrain.models.shapes import parameter_arrays
from graphtrain.weights.digests import record_weights
from graphtrain.weights.exportable import export_obstacle
from graphtrain.weights.families import (
    Family,
    family_of_config,
    family_of_model,
    functional_settings,
)
from graphtrain.weights.families.family import (
    LayerWeights,
    array_shape,
    to_decoder,
    to_hugging_face,
)
from graphtrain.weights.files import (
    DTYPE_CODES,
    WeightFiles,
    numpy_dtype_of,
)
from graphtrain.weights.finite import ExportedValues, read_finite
from graphtrain.weights.hf_record import record_hf_files, verify_hf_files
from graphtrain.weights.open import open_weights
from graphtrain.weights.quantized_files import open_hugging_face
from graphtrain.weights.sources import HF_FILES, WeightSource, checkpoint_step, stored_name
from graphtrain.weights.tokenizer import describe_tokenizer
from graphtrain.weights.writer import MAX_FILE_BYTES, SafetensorsWriter
from sharding_rules.documents import DocumentError, read_bytes

Progress = Callable[
    [int, int], None
]  # called with the number of finished groups of arrays and of all
_EMBEDDING, _HEAD = "embedding/tokens", "lm_head.weight"
_WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|h5|msgpack|gguf|onnx)|.*\.index\.json")


@dataclass(frozen=True)
class ConversionSummary:
    """Summary of a conversion."""

    family: str
    parameters: int  # number of parameters
    arrays: int  # number of arrays
    dtype: str


@dataclass(frozen=True)
class ExportedFiles:
    """The form of exported weights."""

    dtype: str | None = None  # None: as of the initial weights, or float32
    max_file_bytes: int = MAX_FILE_BYTES  # of one file; several have an index

    @property
    def numpy_dtype(self) -> np.dtype | None:
        return None if self.dtype is None else numpy_dtype_of("--dtype", self.dtype)


def import_hugging_face(source: Path, destination: Path, progress: Progress) -> ConversionSummary:
    """Convert a folder that transformers can load into a converted folder.

    Args:
        source: folder with config.json and weights.
        destination: folder to create.
        progress: called for each group of arrays.

    Raises:
        WeightsError: the family is not supported, or the weights do not match config.json.
    """
    config = read_config(source)
    family = family_of_config(config)
    folder = open_hugging_face(source)
    model = _without_absent_module(family.model_from_config(config), folder)
    all_layer_weights = [
        _without_omitted_prefix(layer_weights, family, folder)
        for layer_weights in family.weights(model)
    ]
    _check_names(all_layer_weights, family, model, folder)
    with create_directory(destination) as directory:
        arrays = write_decoder(directory, all_layer_weights, folder, model, progress)
        copy_hf_files(source, directory / HF_FILES)
        record_hf_files(directory)
    _check_tokenizer(source, model.vocab)
    progress(len(all_layer_weights), len(all_layer_weights))
    return summarize(family, model, arrays)


def write_decoder(
    directory: Path,
    all_layer_weights: Sequence[LayerWeights],
    files: WeightFiles,
    model: Model,
    progress: Progress,
) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    """Write a converted folder: the decoder's arrays, model.toml, and the digests of both.

    Args:
        directory: Folder to fill.
        all_layer_weights: Rows of weights, of every layer.
        files: Files of their tensors, which are read one row at a time.
        model: Settings of the model.
        progress: Called before each row.

    Returns:
        Dtype and shape of each array, by name.

    Raises:
        WeightsError: a tensor has elements that are NaN or infinite.
    """
    arrays = {
        stored_name(path, one.layer): (dtype_of(one, files), array_shape(path, model))
        for one in all_layer_weights
        for path in one.row.paths
    }
    writer = SafetensorsWriter(directory / "weights", arrays)
    for num_done, one in enumerate(all_layer_weights):
        progress(num_done, len(all_layer_weights))
        decoded = to_decoder(one, [read_finite(files, name) for name in one.names], model)
        for path, array in zip(one.row.paths, decoded, strict=True):
            writer.write(stored_name(path, one.layer), array)
    writer.close()
    (directory / "model.toml").write_text(render_model(model))
    record_weights(directory)
    return arrays


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
    # For a model trained from scratch, the folder may contain only a tokenizer.
    config = read_config(weights.side) if (weights.side / "config.json").is_file() else None
    if config is not None:
        config.pop(QUANTIZATION_CONFIG, None)  # of the original weights
    model = with_unpadded_vocab(weights.model, config)
    family = family_of_config(config) if config else _family_of(model)
    all_layer_weights = list(family.weights(model))
    default_dtype = np.dtype(_config_dtype(config))
    arrays = {}
    for layer_weights in all_layer_weights:
        dtype = exported_dtype(
            layer_weights.row.paths[0], weights, files.numpy_dtype, default_dtype
        )
        for name, shape in _shapes(layer_weights, model):
            arrays[name] = dtype, shape
    with create_directory(destination) as directory:
        writer = SafetensorsWriter(directory, arrays, files.max_file_bytes)
        values = ExportedValues()
        for num_done, layer_weights in enumerate(all_layer_weights):
            progress(num_done, len(all_layer_weights))
            padded_arrays = weights.read(layer_weights.row.paths, layer_weights.layer)
            unpadded_arrays = [
                remove_padding(path, array, model)
                for path, array in zip(layer_weights.row.paths, padded_arrays, strict=True)
            ]
            for name, tensor in to_hugging_face(layer_weights, unpadded_arrays, model):
                writer.write(name, values.cast(name, tensor, arrays[name][0]))
        writer.close()
        if weights.side.is_dir():
            verify_hf_files(weights.directory)
            _copy_exported_hf_files(weights.side, directory)
        special = describe_tokenizer(directory, family.model_type) if config is None else {}
        _write_config(directory, family, model, config, arrays, special)
        if files.dtype is not None:
            _write_dtype(directory / "config.json", files.dtype)
        _write_files(directory, more_files)
    values.report(source)
    progress(len(all_layer_weights), len(all_layer_weights))
    return summarize(family, model, arrays)


def exported_dtype(
    path: str, weights: WeightSource, chosen: np.dtype | None, default: np.dtype
) -> np.dtype:
    """Return the dtype of an exported array.

    Buffers are float32, unless the initial weights have another dtype: transformers computes with
    the selection bias of a router in float32, and a rounded one would choose other experts.
    """
    stored = weights.dtype(path)
    if parameter_arrays(weights.model)[path].role == "buffer":
        return stored if stored and chosen is None else np.dtype("float32")
    return chosen or stored or default


def _family_of(model: Model) -> Family:
    """Return the first family that has a model.

    Raises:
        WeightsError: none has; names the settings to change.
    """
    if (obstacle := export_obstacle(model)) is not None:
        raise WeightsError(f"{obstacle}; train with these settings to export the model")
    return family_of_model(model)


def run_of_imported_model(source: Path) -> ResolvedProgram | None:
    """Return the program of a run directory if its model is imported from PyTorch, else None.

    Raises:
        WeightsError: the model is a Flax module of the user, for which there is no other format.
    """
    if not (source / "config.toml").is_file() or not (source / "checkpoints").is_dir():
        return None
    from graphtrain.config import load_config

    program = load_config(source / "config.toml").program
    if isinstance(program.model, FlaxModel):
        raise WeightsError(
            f"{source}: the weights of program.model.flax have no Hugging Face format; read the "
            "checkpoint with Orbax"
        )
    uses_names = open_language_model(program.model).uses_module_names
    return resolve(program) if uses_names else None


def _export_torch_model(
    program: ResolvedProgram,
    source: Path,
    destination: Path,
    progress: Progress,
    step: int | None,
    files: ExportedFiles,
    more_files: Mapping[str, bytes],
) -> ConversionSummary:
    from graphtrain.weights.torch_modules import export

    resolved_step = checkpoint_step(source, step)
    with create_directory(destination) as directory:
        if (source / HF_FILES).is_dir():
            verify_hf_files(source)
            _copy_exported_hf_files(source / HF_FILES, directory)
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


def read_config(directory: Path) -> dict[str, Any]:
    """Read the config.json of a folder.

    Raises:
        WeightsError: it is missing or not a JSON object.
    """
    path = directory / "config.json"
    try:
        return read_config_json(path)
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror}") from error
    except DocumentError as error:
        raise WeightsError(f"{path} cannot be used: {error}") from error


def _without_omitted_prefix(
    layer_weights: LayerWeights, family: Family, folder: WeightFiles
) -> LayerWeights:
    """Remove the family's prefix from the tensor names if the folder omits it."""
    if layer_weights.names[0] in folder.names or not family.prefix:
        return layer_weights
    return replace(
        layer_weights, names=tuple(name.removeprefix(family.prefix) for name in layer_weights.names)
    )


def _without_absent_module(model: Model, folder: WeightFiles) -> Model:
    """Return the model without a module of multi-token prediction if the folder has none.

    transformers saves config.json with its number of modules, and no weights of them.
    """
    has_module = any(name.endswith(".eh_proj.weight") for name in folder.names)
    return model if has_module else replace(model, mtp_loss_weight=None)


def _check_names(
    all_layer_weights: list[LayerWeights], family: Family, model: Model, folder: WeightFiles
) -> None:
    required = {name for layer_weights in all_layer_weights for name in layer_weights.names}
    available = set(folder.names)
    if missing := sorted(required - available):
        raise WeightsError(
            f"the weights do not contain {first_names(missing)}, required by config.json"
        )
    head = (re.escape(_HEAD),) if model.tie_word_embeddings else ()  # a copy of the embedding
    ignored = re.compile("|".join((*family.ignored_tensors, *head)))
    if unexpected := sorted(name for name in available - required if not ignored.fullmatch(name)):
        is_ahead = any(name.endswith(".eh_proj.weight") for name in unexpected)
        raise WeightsError(
            f"the weights contain {first_names(unexpected)}, which a {family.model_type} model "
            "with this config.json does not have"
            + ("; multi-token prediction is not supported in this family" if is_ahead else "")
        )
    if model.tie_word_embeddings and _HEAD in available:
        _check_tied(all_layer_weights, folder)


def _check_tied(all_layer_weights: list[LayerWeights], folder: WeightFiles) -> None:
    """Refuse a stored LM head that is not the embedding, though config.json ties them.

    transformers 5 then uses the stored head.
    """
    embedding = next(one for one in all_layer_weights if one.row.paths == (_EMBEDDING,)).names[0]
    if not np.array_equal(folder.read(_HEAD), folder.read(embedding)):
        raise WeightsError(
            f"config.json ties the LM head to the embedding, but the weights have a {_HEAD} that "
            f"differs from {embedding}; set tie_word_embeddings to false in config.json to use it, "
            "or remove it from the weights"
        )


def first_names(names: list[str]) -> str:
    """Return the first three names, and the number of the others, for an error message."""
    suffix = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + suffix


def dtype_of(layer_weights: LayerWeights, folder: WeightFiles) -> np.dtype:
    """Return the common dtype of the tensors of one row.

    Raises:
        WeightsError: they have different dtypes.
    """
    dtypes = {folder.dtype(name) for name in layer_weights.names}
    if len(dtypes) > 1:
        raise WeightsError(
            f"{layer_weights.names[0]} and the tensors stacked with it have the dtypes "
            f"{' and '.join(sorted(map(str, dtypes)))}; they form one array and must have one dtype"
        )
    return dtypes.pop()


def _config_dtype(config: dict[str, Any] | None) -> str:
    settings = config or {}
    dtype_name = str(settings.get("dtype") or settings.get("torch_dtype"))
    return dtype_name if dtype_name in {str(dtype) for dtype in DTYPE_CODES} else "float32"


def with_unpadded_vocab(model: Model, config: dict[str, Any] | None) -> Model:
    """Return the model without rows of the embedding that stand for no token.

    Its vocabulary size is that of config.json, if that is smaller.
    """
    tokens = model.vocab_tokens
    vocab = (config or {}).get("vocab_size") or tokens
    return replace(model, vocab=min(vocab, tokens), vocab_padding=None)


def remove_padding(path: str, array: np.ndarray, model: Model) -> np.ndarray:
    """Return the array without rows of vocabulary padding."""
    return array[tuple(slice(size) for size in array_shape(path, model))]


def _shapes(layer_weights: LayerWeights, model: Model) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of the tensors of one row, computed without allocating arrays."""
    empty = [
        np.broadcast_to(np.int8(0), array_shape(path, model)) for path in layer_weights.row.paths
    ]
    for name, tensor in to_hugging_face(layer_weights, empty, model):
        yield name, tensor.shape


def _write_config(
    directory: Path,
    family: Family,
    model: Model,
    config: dict[str, Any] | None,
    arrays: dict[str, tuple[np.dtype, tuple[int, ...]]],
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


def _copy_exported_hf_files(source: Path, destination: Path) -> None:
    """Copy all files except weights; config.json without the quantization of the original ones."""
    copy_hf_files(source, destination)
    path = destination / "config.json"
    config = read_config(destination) if path.is_file() else {}
    if config.pop(QUANTIZATION_CONFIG, None) is not None:
        path.write_text(json.dumps(config, indent=2) + "\n")


def copy_hf_files(source: Path, destination: Path) -> None:
    """Copy all files except weights: configuration, tokenizer, chat template, code, licence."""
    destination.mkdir(exist_ok=True)
    root = _real_root(source)
    for path in source.iterdir():
        if _WEIGHTS.fullmatch(path.name) or not path.is_file():
            continue
        if not path.resolve().is_relative_to(root):
            warnings.warn(
                f"{path} is a link to a file outside {root} and is not copied; replace it by the "
                "file if it belongs to the model",
                stacklevel=2,
            )
            continue
        shutil.copyfile(path, destination / path.name)


def _check_tokenizer(source: Path, embedding: int) -> None:
    """Warn of a tokenizer.json that contradicts itself or config.json; the weights are unaffected.

    There is nothing else to verify it by: a published folder has no digests.
    """
    path = source / "tokenizer.json"
    if not path.is_file():
        return
    try:
        definition = read_bytes(path)
        check_tokenizer(definition, str(path))
        problem = vocabulary_problem(definition, embedding)
        message = problem and f"{path}: {problem}; use the tokenizer of this model"
    except (OSError, DocumentError, DataError) as error:
        message = str(error)
    if message:
        warnings.warn(message, stacklevel=3)


def _real_root(source: Path) -> Path:
    """Return the folder that the files of a Hugging Face folder may be in, links resolved.

    In the cache of the hub, files are links from models--NAME/snapshots/COMMIT to
    models--NAME/blobs; elsewhere, links must stay in the folder.
    """
    real = source.resolve()
    repository = real.parent.parent
    in_hub_cache = real.parent.name == "snapshots" and repository.name.startswith("models--")
    return repository if in_hub_cache else real


def summarize(
    family: Family, model: Model, arrays: dict[str, tuple[np.dtype, tuple[int, ...]]]
) -> ConversionSummary:
    """Summarize the conversion of a model to these arrays, given by name as dtype and shape."""
    dtypes = Counter(str(dtype) for dtype, _ in arrays.values())
    return ConversionSummary(
        family.model_type,
        parameter_count(model),
        len(arrays),
        " and ".join(name for name, _ in dtypes.most_common()),
    )
