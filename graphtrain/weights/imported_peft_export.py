"""Export of adapters of imported models, as folders that PEFT loads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from graphtrain.config.schema import Adapter
from graphtrain.errors import WeightsError
from graphtrain.models.lora.trainable import LORA_A, LORA_B
from graphtrain.weights.conversion import ConversionSummary
from graphtrain.weights.expert_factors import WRAPPED
from graphtrain.weights.peft_config import common_config, name_within_layer, split_targets
from graphtrain.weights.peft_folder import PEFT_PREFIX, write_adapter_folder
from graphtrain.weights.stacked_orders import block_rows
from graphtrain.weights.torch_modules import unpadded_module

if TYPE_CHECKING:
    from graphtrain.config.resolve import ResolvedProgram
    from graphtrain.torch_frontend.model import OpenedModel


def export_imported_peft(
    program: ResolvedProgram,
    source: Path,
    destination: Path,
    step: int,
    more_files: Mapping[str, bytes] | None = None,
) -> ConversionSummary:
    """Export the adapter of a run of an imported model as a folder that PEFT can load.

    Args:
        program: Program of the run.
        source: Directory of the run.
        destination: Folder to create.
        step: Step of the checkpoint.
        more_files: Other files of the folder, by name.

    Raises:
        WeightsError: PEFT cannot represent the adapter, or the folder cannot be written.
    """
    from graphtrain.checkpoints.manifest import verify_files
    from graphtrain.torch_frontend.language_model import TorchLanguageModel

    verify_files(source / "checkpoints" / str(step))
    model: Any = program.model
    opened = TorchLanguageModel(model).opened()
    tensors, config = _tensors_and_config(program, opened, source / "checkpoints", step)
    write_adapter_folder(destination, tensors, config, more_files)
    count = sum(tensor.size for tensor in tensors.values())
    kind = getattr(getattr(opened.meta.module, "config", None), "model_type", str(model.torch))
    return ConversionSummary(kind, count, len(tensors), "float32")


def _tensors_and_config(
    program: ResolvedProgram, opened: OpenedModel, checkpoints: Path, step: int
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the tensors of a PEFT folder by name, and its configuration."""
    from graphtrain.checkpoints.arrays import restore_array
    from graphtrain.torch_frontend.adapters import fully_trained_paths, lora_orders

    adapter = program.adapter
    assert adapter is not None
    names, orders = opened.parameter_names_by_path(), lora_orders(opened, adapter)
    saved = fully_trained_paths(opened, adapter)

    def rows(path: str, stored: str) -> np.ndarray:
        array = restore_array(checkpoints, step, f"parameters/{stored}")
        return block_rows(opened, path, array, program.stages)

    tensors: dict[str, np.ndarray] = {}
    whole: list[str] = []  # names of parameters that are trained in full
    adapted = {name for path in orders for name in names[path]}
    for path, order in orders.items():
        first, second = (rows(path, f"{path}/{name}") for name in (LORA_A, LORA_B))
        for name, a, b in zip(names[path], first, second, strict=True):
            module = name.removesuffix(".weight")
            if "e" in order:
                module = _wrapped_module(opened, name, adapted)
                a = a.reshape(-1, a.shape[-1])
                b = np.moveaxis(b, 0, -1).reshape(b.shape[1], -1)
            tensors[f"{PEFT_PREFIX}{module}.lora_A.weight"] = a
            tensors[f"{PEFT_PREFIX}{module}.lora_B.weight"] = b
    tied = _tied_names(opened)
    parameters = unpadded_module(opened).parameters()
    for path in saved:
        for name, padded_row in zip(names[path], rows(path, path), strict=True):
            row = padded_row[tuple(map(slice, parameters[name].shape))]
            for one in (name, *tied.get(name, ())):
                tensors[PEFT_PREFIX + one] = row
                whole.append(one)
    return tensors, _config(opened, adapter, orders, whole)


def _wrapped_module(opened: OpenedModel, name: str, adapted: set[str]) -> str:
    """Return the module in which PEFT stores the factors of a parameter of experts.

    PEFT wraps a module once for each adapted parameter, in their order; the last one is outside.
    """
    module, _, own = name.rpartition(".")
    inner = dict(opened.meta.module.get_submodule(module).named_parameters(recurse=False))
    wrapped = [one for one in inner if f"{module}.{one}" in adapted]
    return module + WRAPPED * (len(wrapped) - 1 - wrapped.index(own))


def _config(
    opened: OpenedModel, adapter: Adapter, orders: Mapping[str, str], whole: list[str]
) -> dict[str, Any]:
    names = opened.parameter_names_by_path()
    linear = [
        name.removesuffix(".weight")
        for path, order in orders.items()
        if "e" not in order
        for name in names[path]
    ]
    experts = [name for path, order in orders.items() if "e" in order for name in names[path]]
    modules = {name.rpartition(".")[0] for name in whole}
    for module in modules:
        inside = dict(opened.meta.module.get_submodule(module).named_parameters())
        if missing := [one for one in inside if f"{module}.{one}" not in whole]:
            raise WeightsError(
                f"PEFT saves complete modules, and {module} also contains {', '.join(missing)}; "
                "train with them in program.adapter.modules_to_save"
            )
    all_modules = [name for name, _ in opened.meta.module.named_modules()]
    has_experts = any(".experts." in name for name, _ in opened.meta.module.named_parameters())
    targets, parameters = split_targets(_shortest(linear, all_modules), has_experts=has_experts)
    parameters += sorted({name_within_layer(name) for name in experts})
    return {
        **common_config(adapter, has_parameters=bool(parameters)),
        "target_modules": targets,
        "target_parameters": parameters or None,
        "modules_to_save": _shortest(sorted(modules), all_modules) or None,
        "fan_in_fan_out": "io" in orders.values(),
    }


def _tied_names(opened: OpenedModel) -> dict[str, list[str]]:
    """Return the other names of each tied parameter, by its first.

    PEFT copies a module that it saves, and leaves one that is tied to it as it is in the base.
    """
    by_identity: dict[int, list[str]] = {}
    for name, parameter in opened.meta.module.named_parameters(remove_duplicate=False):
        by_identity.setdefault(id(parameter), []).append(name)
    return {names[0]: names[1:] for names in by_identity.values() if names[1:]}


def _shortest(modules: list[str], all_modules: list[str]) -> list[str]:
    """Return names within layers if PEFT finds exactly these modules by them, else full names."""
    short = list(dict.fromkeys(name_within_layer(module) for module in modules))
    found = {
        module
        for module in all_modules
        if any(module == name or module.endswith(f".{name}") for name in short)
    }
    return short if found == set(modules) else modules
