"""LoRA factors of the native decoder's experts, as PEFT has them: of stacked parameters.

In modules of transformers, gate and up of all experts are one parameter, with one pair of factors.
The decoder's factors are concatenated, each with zeros for the outputs of the other: this is exact,
and doubles the rank. PEFT's own factors are imported with a shared `lora_a`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from graphtrain.errors import WeightsError
from graphtrain.models.lora.trainable import LORA_A, LORA_B
from graphtrain.weights.factors import AdapterTable

WRAPPED = ".base_layer"  # of a module in which PEFT adapts several parameters
_MODULE = re.compile(r"(.+\.)(?:mlp|block_sparse_moe)(\.experts)\.\d+\.", re.ASCII)
_PARAMETERS = {
    "gate_up_proj": ("layers/mlp/gate", "layers/mlp/up"),
    "down_proj": ("layers/mlp/down",),
}

Pair = tuple[np.ndarray, np.ndarray]


def expert_parameters(table: AdapterTable) -> dict[str, list[str]]:
    """Return the paths of the adapted weights in each parameter of the modules, in their order."""
    if table.model.moe is None:
        return {}
    chosen = {
        parameter: [path for path in paths if path in table.targets]
        for parameter, paths in _PARAMETERS.items()
    }
    return {parameter: paths for parameter, paths in chosen.items() if paths}


def expert_modules(table: AdapterTable) -> dict[int, str]:
    """Return the module of the experts by layer; empty if none are adapted.

    Raises:
        WeightsError: the family's experts are not stored as PEFT's factors assume.
    """
    if not expert_parameters(table):
        return {}
    modules = {}
    for weights in table.family.weights(table.model):
        if weights.row.paths == ("layers/mlp/down",):
            match = _MODULE.match(weights.names[0])
            if match is None or weights.layer is None:
                raise WeightsError(
                    f"factors of the experts of {table.family.model_type} models have no form in "
                    'PEFT here; export merged weights (run.export = "hf")'
                )
            modules[weights.layer] = f"{match[1]}mlp{match[2]}"
    return modules


def parameter_names(module: str, parameters: Sequence[str]) -> dict[str, str]:
    """Return the name of the wrapper of each adapted parameter of a module; the last is outside."""
    depth = len(parameters) - 1
    return {name: module + WRAPPED * (depth - index) for index, name in enumerate(parameters)}


def to_peft_experts(parameter: str, pairs: Mapping[str, Pair]) -> Pair:
    """Convert factor pairs by path to lora_A (experts x rank, in) and lora_B (out, rank x experts).

    Args:
        parameter: Parameter of the module.
        pairs: Factors (experts, in, rank) and (experts, rank, out) by path.
    """
    paths, (some_a, some_b) = _PARAMETERS[parameter], next(iter(pairs.values()))
    experts, rank, size = some_b.shape
    first = np.concatenate([a.swapaxes(1, 2) for a, _ in pairs.values()], 1)
    second = np.zeros((experts, size * len(paths), rank * len(pairs)), some_b.dtype)
    for index, (path, (_, b)) in enumerate(pairs.items()):
        begin = paths.index(path) * size
        ranks = slice(index * rank, (index + 1) * rank)
        second[:, begin : begin + size, ranks] = b.swapaxes(1, 2)
    return first.reshape(-1, some_a.shape[1]), np.moveaxis(second, 0, -1).reshape(
        second.shape[1], -1
    )


def from_peft_experts(
    parameter: str,
    paths: Sequence[str],
    lora_a: np.ndarray,
    lora_b: np.ndarray,
    table: AdapterTable,
) -> dict[str, Pair]:
    """Convert lora_A and lora_B of a parameter to the decoder's factor pairs by path.

    Raises:
        WeightsError: the factors have another rank or other shapes, or adapt other weights too.
    """
    model, rank = table.model, table.adapter.rank
    assert model.moe is not None
    experts, sizes = model.moe.experts, (model.embed, 2 * model.mlp)
    inputs, outputs = sizes if parameter == "gate_up_proj" else (model.mlp, model.embed)
    count = len(lora_a) // experts
    if (lora_a.shape, lora_b.shape) != ((experts * count, inputs), (outputs, count * experts)):
        raise WeightsError(
            f"factors of {parameter} of experts have shapes {lora_a.shape} and {lora_b.shape}, not "
            f"of {inputs} inputs and {outputs} outputs; the adapter belongs to another "
            "model, or adapts more parameters of experts than [program.adapter]"
        )
    if count not in (rank, rank * len(paths)):
        raise WeightsError(
            f"{parameter} of experts has rank {count}, but program.adapter.rank = {rank}; set it "
            f"to {count}"
        )
    first = lora_a.reshape(experts, count, -1).swapaxes(1, 2)
    second = lora_b.reshape(len(lora_b), count, experts)
    second = np.moveaxis(second, -1, 0).swapaxes(1, 2).copy()  # (experts, count, out)
    size = second.shape[-1] // len(_PARAMETERS[parameter])
    pairs = {}
    for index, path in enumerate(paths):
        ranks = slice(None) if count == rank else slice(index * rank, (index + 1) * rank)
        begin = _PARAMETERS[parameter].index(path) * size
        pairs[path] = first[:, :, ranks], second[:, ranks, begin : begin + size].copy()
        second[:, ranks, begin : begin + size] = 0
    if second.any():
        raise WeightsError(
            f"{parameter} of experts adapts more than {', '.join(paths)}, or shares its factors; "
            f"add the others to program.adapter.target_modules, or set program.adapter.rank = "
            f"{count}"
        )
    return pairs


def expert_tensors(
    table: AdapterTable, read: Callable[[Sequence[str], int | None], list[np.ndarray]]
) -> dict[str, np.ndarray]:
    """Return the tensors of PEFT's factors of experts, by name without PEFT's prefix."""
    tensors, parameters = {}, expert_parameters(table)
    for layer, module in expert_modules(table).items():
        wrappers = parameter_names(module, list(parameters))
        for parameter, paths in parameters.items():
            factors = read([f"{path}/{name}" for path in paths for name in (LORA_A, LORA_B)], layer)
            pairs = dict(zip(paths, zip(factors[::2], factors[1::2], strict=True), strict=True))
            first, second = to_peft_experts(parameter, pairs)
            tensors[f"{wrappers[parameter]}.lora_A.weight"] = first
            tensors[f"{wrappers[parameter]}.lora_B.weight"] = second
    return tensors


def config_of_experts(table: AdapterTable) -> dict[str, Any]:
    """Return the entries of adapter_config.json of experts: their parameters, and their ranks."""
    adapter, modules = table.adapter, list(expert_modules(table).values())
    if not modules:
        return {}
    stem = re.sub(r".*?\.\d+\.", "", modules[0], count=1)
    parameters = expert_parameters(table)
    counts = {f"{stem}.{name}": len(paths) for name, paths in parameters.items() if len(paths) > 1}
    scales = {
        name: adapter.alpha * (count**0.5 if adapter.use_rslora else count)
        for name, count in counts.items()
    }
    return {
        "target_parameters": [f"{stem}.{name}" for name in parameters],
        "rank_pattern": {name: adapter.rank * count for name, count in counts.items()},
        "alpha_pattern": scales,
    }
