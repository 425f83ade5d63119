"""Conversion of a Megatron-LM checkpoint to a converted folder, one array at a time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from graphtrain.checkpoints.output_directory import create_directory
from graphtrain.config.presets import preset_settings
from graphtrain.config.render import render_model
from graphtrain.config.schema import Model
from graphtrain.errors import WeightsError
from graphtrain.models.flops import is_gated
from graphtrain.weights.conversion import ConversionSummary, Progress, summarize
from graphtrain.weights.decoder_writer import dtype_of
from graphtrain.weights.digests import record_weights
from graphtrain.weights.families.family import LayerWeights, array_shape, to_decoder
from graphtrain.weights.files import WeightFiles, first_names
from graphtrain.weights.finite import read_finite
from graphtrain.weights.megatron.arguments import model_from_arguments
from graphtrain.weights.megatron.classic import RankFoldersCheckpoint
from graphtrain.weights.megatron.distributed import TorchDist
from graphtrain.weights.megatron.nemo import CONFIG, JoinedGates, read_nemo_config
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
        source: Folder of one checkpoint, or of several, of which the latest is used; or the path
            of a .ckpt file of NeMo without the folder of the rank.
        destination: Folder to create.
        progress: Called for each group of arrays.
        model: Preset, .toml file or NeMo's .yaml file, for checkpoints that do not contain
            arguments.
        vocab: Vocabulary size without padding; None: the size in the arguments or the preset, else
            all rows.

    Raises:
        WeightsError: the model is unknown, or the weights do not match it or are not finite.
    """
    folder, arguments = open_checkpoint(_iteration(source))
    padded, unpadded = _models(folder, arguments, model, vocab)
    folder = _with_gates(folder, padded)
    family = megatron_family(padded)
    all_layer_weights = list(family.weights(padded))
    _check_names(
        {name for layer_weights in all_layer_weights for name in layer_weights.names},
        folder,
        padded,
    )
    arrays = {}
    for layer_weights in all_layer_weights:
        for path in layer_weights.row.paths:
            shape = array_shape(path, unpadded)
            arrays[stored_name(path, layer_weights.layer)] = dtype_of(layer_weights, folder), shape
    with create_directory(destination) as directory:
        writer = SafetensorsWriter(directory / "weights", arrays)
        for num_done, layer_weights in enumerate(all_layer_weights):
            progress(num_done, len(all_layer_weights))
            _write(writer, layer_weights, folder, padded, unpadded)
        writer.close()
        (directory / "model.toml").write_text(render_model(unpadded))
        record_weights(directory)
    progress(len(all_layer_weights), len(all_layer_weights))
    return summarize(family, unpadded, arrays)


def _write(
    writer: SafetensorsWriter,
    layer_weights: LayerWeights,
    folder: WeightFiles,
    padded: Model,
    unpadded: Model,
) -> None:
    """Convert and write one group of arrays without retaining them in memory."""
    tensors = [read_finite(folder, name) for name in layer_weights.names]
    arrays = to_decoder(layer_weights, tensors, padded)
    for path, array in zip(layer_weights.row.paths, arrays, strict=True):
        unpadded_index = tuple(slice(size) for size in array_shape(path, unpadded))
        writer.write(stored_name(path, layer_weights.layer), array[unpadded_index])


def open_checkpoint(source: Path) -> tuple[WeightFiles, dict[str, Any]]:
    """Open one checkpoint; return its weights, and its arguments, if it contains them.

    Raises:
        WeightsError: the checkpoint has no supported format, or is damaged.
    """
    directory, file_name = source, None
    if source.suffix == ".nemo" and source.is_file():
        raise WeightsError(
            f"{source} is an archive; unpack it, for example with tar -xf {source} -C DIRECTORY, "
            "and convert DIRECTORY"
        )
    if source.suffix == ".ckpt" and not source.is_dir():
        directory, file_name = source.parent, source.name
    if (weights := directory / "model_weights").is_dir():  # of an unpacked .nemo archive
        return open_checkpoint(weights)[0], _nemo_arguments(directory)
    if (directory / ".metadata").is_file():
        common = directory / "common.pt"
        state = load_torch(common) if common.is_file() else {}
        return TorchDist(directory), vars(state["args"]) if "args" in state else {}
    if file_name or any(
        any(directory.glob(name)) for name in ("mp_rank_*", "tp_rank_*", "model_weights.ckpt")
    ):
        classic = RankFoldersCheckpoint(directory, file_name)
        return classic, classic.arguments or _nemo_arguments(directory)
    raise WeightsError(
        f"{directory} is not a checkpoint of Megatron-LM or NeMo: it contains neither .metadata "
        "(torch-dist) nor folders mp_rank_XX or tp_rank_XX_pp_rank_XXX"
    )


def _nemo_arguments(directory: Path) -> dict[str, Any]:
    config = directory / CONFIG
    return dict(read_nemo_config(config)) if config.is_file() else {}


def _with_gates(folder: WeightFiles, model: Model) -> WeightFiles:
    """Return the weights with gate and up in one array, as the checkpoint's ranks divide them."""
    if any(".linear_fc1_up." in name for name in folder.names):
        return JoinedGates(folder)
    if isinstance(folder, RankFoldersCheckpoint):
        folder.gated = is_gated(model)
    return folder


def _iteration(source: Path) -> Path:
    """Return the latest checkpoint of a folder, or the folder itself; NeMo uses `weights`."""
    latest = source / _LATEST
    if latest.is_file():
        iteration = latest.read_text().strip()
        name = (
            iteration
            if iteration == "release"
            else f"iter_{int(iteration):07d}"
            if iteration.isdigit()
            else ""
        )
        if not name or not (source / name).is_dir():
            raise WeightsError(
                f"{latest} names {iteration!r}, but no such checkpoint folder exists"
            )
        return source / name
    if (source / "weights").is_dir():
        return source / "weights"
    if not source.is_dir() and source.suffix not in (".ckpt", ".nemo"):
        raise WeightsError(f"{source}: no such folder")
    return source


def _models(
    folder: WeightFiles, arguments: dict[str, Any], preset: str | None, vocab: int | None
) -> tuple[Model, Model]:
    """Return the model with the checkpoint's padded vocabulary, and with the unpadded one."""
    if _TOKENS not in folder.names:
        raise WeightsError(f"the checkpoint has no {_TOKENS}; it is not of a GPT model")
    rows = folder.shape(_TOKENS)[0]
    if preset is not None and Path(preset).suffix in (".yaml", ".yml"):
        preset, arguments = None, dict(read_nemo_config(Path(preset)))
    if preset is not None:
        model = TypeAdapter(Model).validate_json(json.dumps(preset_settings(preset)))
        model = replace(model, fused_gate_up=False)
        vocab = vocab or min(model.vocab, rows)  # presets contain the unpadded size
    elif arguments:
        model = model_from_arguments(arguments, rows)
        vocab = vocab or int(arguments.get("vocab_size") or rows)
    else:
        raise WeightsError(
            "the checkpoint does not contain Megatron-LM's args; specify the model: "
            "--model PRESET, --model FILE.toml with a [program.model], or NeMo's --model "
            "FILE.yaml"
        )
    if vocab > rows:
        raise WeightsError(f"a vocabulary of {vocab} exceeds the {rows} rows in the checkpoint")
    return replace(model, vocab=rows), replace(model, vocab=vocab)


def _check_names(required: set[str], folder: WeightFiles, model: Model) -> None:
    available = set(folder.names)
    if missing := sorted(required - available):
        raise WeightsError(
            f"the checkpoint lacks {first_names(missing)}, which a model with its settings "
            "requires; unexpected arrays in it: "
            f"{first_names(sorted(available - required)) or 'none'}"
        )
    unexpected = (
        available - required - ({"output_layer.weight"} if model.tie_word_embeddings else set())
    )
    if unexpected:
        raise WeightsError(
            f"the checkpoint contains {first_names(sorted(unexpected))}, which a model with its "
            "settings does not have"
        )
