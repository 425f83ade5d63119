"""Conversion of MindSpore's checkpoints to a converted folder, one array at a time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from pydantic import TypeAdapter

from graphtrain.checkpoints.output_directory import create_directory
from graphtrain.config.presets import preset_settings
from graphtrain.config.schema import Model
from graphtrain.errors import WeightsError
from graphtrain.weights.conversion import ConversionSummary, Progress, summarize
from graphtrain.weights.decoder_writer import write_decoder
from graphtrain.weights.files import WeightFiles, first_names
from graphtrain.weights.mindspore.rank_files import open_ckpt
from graphtrain.weights.mindspore.rows import check_llama, mindformers_llama

_EMBEDDING = "model.tok_embeddings.embedding_weight"


def from_mindspore(
    source: Path,
    destination: Path,
    progress: Progress,
    model: str | None = None,
    strategy: Path | None = None,
) -> ConversionSummary:
    """Convert `.ckpt` files with MindFormers' names of Llama to a converted folder.

    Args:
        source: A complete `.ckpt` file, or a directory with rank_N/NAME.ckpt.
        destination: Folder to create.
        progress: Called for each group of arrays.
        model: Preset or .toml file; None: model.toml in the source.
        strategy: Strategy file or directory of several; None: `strategy` in the source, if any.

    Raises:
        WeightsError: the model is unknown, or the weights do not match it.
    """
    settings, family = _model(source, model), mindformers_llama()
    check_llama(settings)
    files = open_ckpt(source, strategy)
    if _EMBEDDING in files.names and files.shape(_EMBEDDING)[0] < settings.vocab:
        raise WeightsError(
            f"the model has a vocabulary of {settings.vocab}, and the checkpoint "
            f"{files.shape(_EMBEDDING)[0]} rows of {_EMBEDDING}"
        )
    groups = list(family.weights(settings))
    _check_names({name for group in groups for name in group.names}, files)
    with create_directory(destination) as directory:
        arrays = write_decoder(directory, groups, files, settings, progress)
    progress(len(groups), len(groups))
    return summarize(family, settings, arrays)


def _model(source: Path, model: str | None) -> Model:
    own = source / "model.toml"
    if model is None and not own.is_file():
        raise WeightsError(
            "MindSpore's checkpoints do not describe their model; specify it: --model PRESET, or "
            "--model FILE.toml with a [program.model]"
        )
    settings = preset_settings(model if model is not None else str(own))
    found = TypeAdapter(Model).validate_json(json.dumps(settings))
    return replace(found, fused_gate_up=False)


def _check_names(required: set[str], files: WeightFiles) -> None:
    available = set(files.names)
    if missing := sorted(required - available):
        raise WeightsError(
            f"the checkpoint lacks {first_names(missing)}, which MindFormers' Llama with these "
            f"settings has; others in it: {first_names(sorted(available - required)) or 'none'}"
        )
    if unexpected := sorted(available - required):
        raise WeightsError(
            f"the checkpoint contains {first_names(unexpected)}, which MindFormers' Llama with "
            "these settings does not have"
        )
