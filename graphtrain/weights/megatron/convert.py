"""Conversion of a Megatron-LM checkpoint to a converted folder, one array at a time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from graphtrain.config.presets import preset_settings
from graphtrain.config.render import render_model
from graphtrain.config.schema import Model
from graphtrain.errors import WeightsError
from graphtrain.files import create_directory
from graphtrain.models.flops import is_gated
from graphtrain.weights.convert import (
    ConversionSummary,
    Progress,
    dtype_of,
    first_names,
    summarize,
)
from graphtrain.weights.families.family import LayerWeights, array_shape, to_decoder
from graphtrain.weights.files import WeightFiles
from graphtrain.weights.megatron.arguments import model_from_arguments
from graphtrain.weights.megatron.classic import RankFoldersCheckpoint
from graphtrain.weights.megatron.distributed import TorchDist
from graphtrain.weights.megatron.pickles import load_torch
from graphtrain.weights.megatron.rows import megatron_family
from graphtrain.weights.sources import stored_name
from graphtrain.weights.writer import SafetensorsWriter

_TOKENS = "embedding.word_embeddings.weight"
_LATEST = "latest_checkpointed_iteration.txt"


def from_megatron(
    source: Path,
    destination: Path,
    progress: Progress,
    model: str | None = None,
    vocab: int | None = None,
) -> ConversionSummary:
    """Convert a Megatron-LM checkpoint of any parallelism to a converted folder.

    Args:
        source: Folder of one checkpoint, or of several, of which the latest is used.
        destination: Folder to create.
        progress: Called for each group of arrays.
        model: Preset or .toml file, for checkpoints that do not contain Megatron's arguments.
        vocab: Vocabulary size without padding; None: the size in the arguments or the preset, else
            all rows.

    Raises:
        WeightsError: the model is unknown, or the weights do not match it.
    """
    folder, arguments = open_checkpoint(_iteration(source))
    padded, kept = _models(folder, arguments, model, vocab)
    if isinstance(folder, RankFoldersCheckpoint):
        folder.gated = is_gated(padded)
    family = megatron_family(padded)
    pieces = list(family.weights(padded))
    _check_names({name for piece in pieces for name in piece.names}, folder, padded)
    arrays = {}
    for piece in pieces:
        for path in piece.row.paths:
            shape = array_shape(path, kept)
            arrays[stored_name(path, piece.layer)] = dtype_of(piece, folder), shape
    with create_directory(destination) as directory:
        writer = SafetensorsWriter(directory / "weights", arrays)
        for done, piece in enumerate(pieces):
            progress(done, len(pieces))
            _write(writer, piece, folder, padded, kept)
        writer.close()
        (directory / "model.toml").write_text(render_model(kept))
    progress(len(pieces), len(pieces))
    return summarize(family, kept, arrays)


def _write(
    writer: SafetensorsWriter, piece: LayerWeights, folder: WeightFiles, padded: Model, kept: Model
) -> None:
    """Convert and write one piece without retaining its arrays in memory."""
    made = to_decoder(piece, [folder.read(name) for name in piece.names], padded)
    for path, array in zip(piece.row.paths, made, strict=True):
        cut = tuple(slice(size) for size in array_shape(path, kept))
        writer.write(stored_name(path, piece.layer), array[cut])


def open_checkpoint(directory: Path) -> tuple[WeightFiles, dict[str, Any]]:
    """Open one checkpoint; return its weights, and its arguments, if it contains them.

    Raises:
        WeightsError: the checkpoint has neither supported format, or is damaged.
    """
    if (directory / ".metadata").is_file():
        common = directory / "common.pt"
        state = load_torch(common) if common.is_file() else {}
        return TorchDist(directory), vars(state["args"]) if "args" in state else {}
    if any(directory.glob("mp_rank_*")):
        classic = RankFoldersCheckpoint(directory)
        return classic, classic.arguments
    raise WeightsError(
        f"{directory} is not a Megatron-LM checkpoint: it contains neither .metadata (torch-dist) "
        "nor folders mp_rank_XX"
    )


def _iteration(source: Path) -> Path:
    """Return the latest checkpoint of a folder, or the folder itself; NeMo uses `weights`."""
    latest = source / _LATEST
    if latest.is_file():
        told = latest.read_text().strip()
        name = told if told == "release" else f"iter_{int(told):07d}" if told.isdigit() else ""
        if not name or not (source / name).is_dir():
            raise WeightsError(f"{latest} names {told!r}, but no such checkpoint folder exists")
        return source / name
    if (source / "weights").is_dir():
        return source / "weights"
    if not source.is_dir():
        raise WeightsError(f"{source}: no such folder")
    return source


def _models(
    folder: WeightFiles, arguments: dict[str, Any], named: str | None, vocab: int | None
) -> tuple[Model, Model]:
    """Return the model with the checkpoint's padded vocabulary, and with the unpadded one."""
    if _TOKENS not in folder.names:
        raise WeightsError(f"the checkpoint has no {_TOKENS}; it is not of a GPT model")
    rows = folder.shape(_TOKENS)[0]
    if named is not None:
        model = TypeAdapter(Model).validate_json(json.dumps(preset_settings(named)))
        model = replace(model, fused_gate_up=False)
        vocab = vocab or min(model.vocab, rows)  # presets contain the unpadded size
    elif arguments:
        model = model_from_arguments(arguments, rows)
        vocab = vocab or int(arguments.get("vocab_size") or rows)
    else:
        raise WeightsError(
            "the checkpoint does not contain Megatron-LM's args; specify the model: "
            "--model PRESET, or --model FILE.toml with a [program.model]"
        )
    if vocab > rows:
        raise WeightsError(f"a vocabulary of {vocab} exceeds the {rows} rows in the checkpoint")
    return replace(model, vocab=rows), replace(model, vocab=vocab)


def _check_names(wanted: set[str], folder: WeightFiles, model: Model) -> None:
    there = set(folder.names)
    if missing := sorted(wanted - there):
        raise WeightsError(
            f"the checkpoint lacks {first_names(missing)}, which a model with its settings "
            f"requires; unexpected arrays in it: {first_names(sorted(there - wanted)) or 'none'}"
        )
    left = there - wanted - ({"output_layer.weight"} if model.tie_word_embeddings else set())
    if left:
        raise WeightsError(
            f"the checkpoint contains {first_names(sorted(left))}, which a model with its settings "
            "does not have"
        )
