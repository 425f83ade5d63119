"""Conversion of a Hugging Face folder to a converted folder, one array at a time."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np

from graphtrain.checkpoints.output_directory import create_directory
from graphtrain.config.schema import Model
from graphtrain.data.tokenizers.consistency import check_tokenizer, vocabulary_problem
from graphtrain.errors import DataError, WeightsError
from graphtrain.weights.conversion import ConversionSummary, Progress, summarize
from graphtrain.weights.decoder_writer import write_decoder
from graphtrain.weights.families import Family, family_of_config
from graphtrain.weights.families.family import LayerWeights
from graphtrain.weights.files import WeightFiles, first_names
from graphtrain.weights.hf_files import copy_hf_files, read_config
from graphtrain.weights.hf_record import record_hf_files
from graphtrain.weights.quantized_files import open_hugging_face
from graphtrain.weights.sources import HF_FILES
from sharding_rules.documents import DocumentError, read_bytes

_EMBEDDING, _HEAD = "embedding/tokens", "lm_head.weight"


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
