"""Export of adapters of the native decoder, as folders that PEFT loads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from graphtrain.errors import WeightsError
from graphtrain.models.lora.trainable import LORA_A, LORA_B
from graphtrain.weights.conversion import ConversionSummary
from graphtrain.weights.expert_factors import config_of_experts, expert_tensors
from graphtrain.weights.exported_arrays import remove_padding
from graphtrain.weights.factors import (
    EMBEDDING,
    AdapterTable,
    input_axes,
    module_of,
    rank_axis,
    read_in_layer,
    to_peft,
    weights_of_layers,
)
from graphtrain.weights.families.family import LayerWeights, to_hugging_face
from graphtrain.weights.imported_run import run_of_imported_model
from graphtrain.weights.peft_config import common_config, name_within_layer, split_targets
from graphtrain.weights.peft_folder import PEFT_PREFIX, write_adapter_folder
from graphtrain.weights.sources import RunCheckpoint, checkpoint_step

Read = Callable[[Sequence[str], int | None], list[np.ndarray]]


def export_peft(
    source: Path,
    destination: Path,
    step: int | None = None,
    *,
    more_files: Mapping[str, bytes] | None = None,
) -> ConversionSummary:
    """Export the adapter of a run as a folder that PEFT can load.

    Args:
        source: Directory of the run.
        destination: Folder to create.
        step: Step of the checkpoint; None for the last.
        more_files: Other files of the folder, by name.

    Raises:
        WeightsError: the run trained no adapter, or PEFT cannot represent it.
    """
    if (program := run_of_imported_model(source)) is not None and program.adapter is not None:
        from graphtrain.weights.imported_peft_export import export_imported_peft

        chosen = checkpoint_step(source, step)
        return export_imported_peft(program, source, destination, chosen, more_files)
    run = RunCheckpoint(source, step)
    adapter = run.program.adapter
    if adapter is None:
        raise WeightsError(
            f"{source} trained all weights, not an adapter ([program.adapter] is not set)"
        )
    return write_peft_folder(
        AdapterTable.from_folder(run.side, run.model, adapter), run.read, destination, more_files
    )


def write_peft_folder(
    table: AdapterTable,
    read: Read,
    destination: Path,
    more_files: Mapping[str, bytes] | None = None,
) -> ConversionSummary:
    """Write an adapter as a folder that PEFT can load.

    Args:
        table: Family, model and weights that the adapter trains.
        read: Returns the arrays of trainable paths in a layer.
        destination: Folder to create.
        more_files: Other files of the folder, by name.

    Raises:
        WeightsError: PEFT cannot represent the adapter, or the folder cannot be written.
    """
    _check_modules(table)
    tensors = _factors(table, read)
    tensors |= {PEFT_PREFIX + name: one for name, one in expert_tensors(table, read).items()}
    tensors |= _fully_trained(table, read)
    write_adapter_folder(destination, tensors, _config(table), more_files)
    count = sum(tensor.size for tensor in tensors.values())
    return ConversionSummary(table.family.model_type, count, len(tensors), "float32")


def _factors(table: AdapterTable, read: Read) -> dict[str, np.ndarray]:
    """Return PEFT's factors of the adapted weights, by name."""
    tensors: dict[str, np.ndarray] = {}
    for layer_weights in table.adapted_weights():
        paths = [path for path in layer_weights.row.paths if path in table.targets]
        names = [f"{path}/{name}" for path in paths for name in (LORA_A, LORA_B)]
        factors = read_in_layer(read, names, layer_weights.layer)
        pairs = dict(zip(paths, zip(factors[::2], factors[1::2], strict=True), strict=True))
        tensors |= _named_factors(layer_weights, *to_peft(layer_weights, pairs, table.model))
    return tensors


def _fully_trained(table: AdapterTable, read: Read) -> dict[str, np.ndarray]:
    """Return PEFT's tensors of the weights that are trained in full, by name."""
    tensors: dict[str, np.ndarray] = {}
    for layer_weights in table.fully_trained_weights():
        arrays = read(layer_weights.row.paths, layer_weights.layer)
        unpadded = [
            remove_padding(path, array, table.model)
            for path, array in zip(layer_weights.row.paths, arrays, strict=True)
        ]
        for name, tensor in to_hugging_face(layer_weights, unpadded, table.model):
            tensors[PEFT_PREFIX + name] = tensor
            if layer_weights.row.paths == (EMBEDDING,) and (head := table.tie_word_embeddings):
                tensors[PEFT_PREFIX + head] = tensor
    return tensors


def _check_modules(table: AdapterTable) -> None:
    """Raise if PEFT cannot save what is trained in full: parts of modules, or what it has not."""
    if ahead := sorted(path for path in table.modules_to_save if path.startswith("ahead/")):
        raise WeightsError(
            f"{ahead[0]} is trained in full, and PEFT's model has no module of multi-token "
            'prediction; export merged weights (run.export = "hf")'
        )
    modules = {
        name.rpartition(".")[0]
        for layer_weights in table.fully_trained_weights()
        for name in layer_weights.names
    }
    for layer_weights in table.family.weights(table.model):
        for name in layer_weights.names:
            missing_paths = set(layer_weights.row.paths) - table.modules_to_save
            if name.rpartition(".")[0] in modules and missing_paths:
                raise WeightsError(
                    f"PEFT saves complete modules, and {name.rpartition('.')[0]} also contains "
                    f"{', '.join(sorted(missing_paths))}; train with them in "
                    "program.adapter.modules_to_save"
                )


def _named_factors(
    layer_weights: LayerWeights, lora_a: np.ndarray, lora_b: np.ndarray
) -> dict[str, np.ndarray]:
    module = PEFT_PREFIX + module_of(layer_weights)
    return {f"{module}.lora_A.weight": lora_a, f"{module}.lora_B.weight": lora_b}


def _config(table: AdapterTable) -> dict[str, Any]:
    adapter, counts, fan_in_fan_out = table.adapter, _counts_by_module(table), False
    for layer_weights in table.adapted_weights():
        _, is_input = input_axes(layer_weights.row.paths[0], table.model)
        fan_in_fan_out |= rank_axis(layer_weights, table.model) == (0 if is_input else 1)
    packed_counts = {name: count for name, count in counts.items() if count > 1}
    names = [
        name for layer_weights in table.fully_trained_weights() for name in layer_weights.names
    ]
    names += [table.tie_word_embeddings] if table.tie_word_embeddings else []
    saved = {name_within_layer(name.rpartition(".")[0]) for name in names}
    of_experts = config_of_experts(table)
    modules, parameters = split_targets(list(counts), has_experts=table.model.moe is not None)
    parameters += of_experts.get("target_parameters", [])
    return {
        **common_config(adapter, has_parameters=bool(parameters)),
        "target_modules": modules,
        "target_parameters": parameters or None,
        "rank_pattern": {name: adapter.rank * count for name, count in packed_counts.items()}
        | of_experts.get("rank_pattern", {}),
        "alpha_pattern": {
            name: adapter.alpha * (count**0.5 if adapter.use_rslora else count)
            for name, count in packed_counts.items()
        }
        | of_experts.get("alpha_pattern", {}),
        "modules_to_save": sorted(saved) or None,
        "fan_in_fan_out": fan_in_fan_out,
    }


def _counts_by_module(table: AdapterTable) -> dict[str, int]:
    """Return the number of adapted weights in each module, by its name within a layer.

    Modules of the same name of which not all layers adapt as many, as of the dense layers before a
    mixture, have their full names.
    """
    by_module = {
        module_of(weights): len(table.targets & set(weights.row.paths))
        for weights in weights_of_layers(table.family, table.model)
    }
    by_name: dict[str, set[int]] = {}
    for module, count in by_module.items():
        by_name.setdefault(name_within_layer(module), set()).add(count)
    return {
        name_within_layer(module) if len(by_name[name_within_layer(module)]) == 1 else module: count
        for module, count in by_module.items()
        if count
    }
