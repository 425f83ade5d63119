"""LoRA adapters that are served by name beside base weights: of PEFT's folders, and of runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np

from graphtrain.config.schema import Model, Program
from graphtrain.errors import WeightsError
from graphtrain.models.lora.trainable import (
    LORA_A,
    LORA_B,
    can_serve,
    fully_trained_paths,
    is_of_experts,
    lora_paths,
    served_adapter_arrays,
)
from graphtrain.models.shapes import parameter_arrays
from graphtrain.weights.base import different_base_file
from graphtrain.weights.factors import (
    family_of_folder,
    from_peft,
    module_of,
    peft_shapes,
    read_in_layer,
    weights_of_layers,
)
from graphtrain.weights.families.family import functional_settings
from graphtrain.weights.peft_folder import (
    ADAPTER_CONFIG,
    PEFT_PREFIX,
    load_adapter_tensors,
    peft_scale,
    read_adapter_config,
)
from graphtrain.weights.sources import RunCheckpoint, WeightSource
from sharding_rules.errors import UserError

Factors = dict[tuple[str, int], tuple[np.ndarray, np.ndarray]]
_MERGE = "serve it alone, merged into its base (graphtrain serve with its run)"


@dataclass(frozen=True)
class ServedBase:
    """Model beside which adapters are served.

    Attributes:
        model: Settings of the model.
        side: Folder of its Hugging Face files; it may not exist.
        open_weights: Opens its weights, to compare them with the base of a run.
        base_dtype: As in [program.adapter]: dtype to which the weights were rounded.
    """

    model: Model
    side: Path
    open_weights: Callable[[], WeightSource]
    base_dtype: str = "float32"


@dataclass(frozen=True)
class NamedAdapter:
    """LoRA factors of one adapter, with its scale in the second one of each pair."""

    name: str
    factors: Factors  # (in..., rank) and (rank, out...), by path and layer
    base_dtype: str | None = None  # of the weights that it was trained on; None: not known

    @property
    def rank(self) -> int:
        """Largest rank of its factors."""
        return max(first.shape[-1] for first, _ in self.factors.values())


def read_adapter(name: str, directory: Path, base: ServedBase) -> NamedAdapter:
    """Read an adapter: a folder that PEFT saved, or the last checkpoint of a run.

    Raises:
        WeightsError: it is neither, or cannot be served beside the base.
    """
    try:
        if (directory / ADAPTER_CONFIG).is_file():
            adapter = NamedAdapter(name, _peft_factors(directory, base))
        elif (directory / "checkpoints").is_dir():
            adapter = _read_run(name, directory, base)
        else:
            raise WeightsError(
                f"{directory} is neither a folder of PEFT (no {ADAPTER_CONFIG}) nor the directory "
                "of a run (no checkpoints)"
            )
    except UserError as error:
        raise WeightsError(f"adapter {name!r}: {error}") from error
    for (path, layer), pair in adapter.factors.items():
        if not all(np.isfinite(factor).all() for factor in pair):
            raise WeightsError(
                f"adapter {name!r}: {path} of layer {layer} has values that are not finite; train "
                "or save it again"
            )
    return adapter


def check_adapters(adapters: Sequence[NamedAdapter], program: Program, remedy: str) -> None:
    """Check that a program has room for adapters, and adapts what they adapt.

    Args:
        adapters: The adapters.
        program: The program that serves.
        remedy: Command that compiles it, for the error message.

    Raises:
        WeightsError: it does not; the message names the setting to change.
    """
    total, serve = sum(adapter.rank for adapter in adapters), program.serve
    if total > serve.total_adapter_rank:
        ranks = " + ".join(f"{adapter.rank} ({adapter.name})" for adapter in adapters)
        summed = f"{ranks} = {total}" if len(adapters) > 1 else ranks
        raise WeightsError(
            f"the rank of the adapters is {summed}, and program.serve.total_adapter_rank = "
            f"{serve.total_adapter_rank}; set it to at least {total}, and compile: {remedy}"
        )
    served = {path.rpartition("/")[0] for path in served_adapter_arrays(program)}
    for adapter in adapters:
        others = sorted({path for path, _ in adapter.factors} - served)
        if never := [path for path in others if not can_serve(program.model, path)]:
            raise WeightsError(
                f"adapter {adapter.name!r} adapts {', '.join(never)}, for which a server has no "
                f"factors by name; {_MERGE}"
            )
        if others:
            raise WeightsError(
                f"adapter {adapter.name!r} adapts {', '.join(others)}, which "
                f"program.serve.adapter_target_modules = {list(serve.adapter_target_modules)} "
                f"leaves out; add them, and compile: {remedy}"
            )


def rank_intervals(adapters: Sequence[NamedAdapter]) -> dict[str, tuple[int, int]]:
    """Return the begin and the end of each adapter's ranks, side by side, by name."""
    intervals, begin = {}, 0
    for adapter in adapters:
        intervals[adapter.name] = begin, begin + adapter.rank
        begin += adapter.rank
    return intervals


def joined_factors(adapters: Sequence[NamedAdapter], program: Program) -> dict[str, np.ndarray]:
    """Return the arrays of served_adapter_arrays: the factors of all adapters, and zeros."""
    arrays = {
        path: np.zeros(spec.shape, np.float32)
        for path, spec in served_adapter_arrays(program).items()
    }
    intervals = rank_intervals(adapters)
    for adapter in adapters:
        begin, _ = intervals[adapter.name]
        for (path, layer), (first, second) in adapter.factors.items():
            end = begin + first.shape[-1]
            arrays[f"{path}/{LORA_A}"][layer, ..., begin:end] = first
            arrays[f"{path}/{LORA_B}"][layer, begin:end] = second
    return arrays


def _peft_factors(directory: Path, base: ServedBase) -> Factors:
    config, tensors = read_adapter_config(directory), load_adapter_tensors(directory)
    family, model = family_of_folder(base.side, base.model)
    factors: Factors = {}
    for weights in weights_of_layers(family, model):
        module, layer = module_of(weights), weights.layer
        names = [f"{PEFT_PREFIX}{module}.lora_{letter}.weight" for letter in "AB"]
        if layer is None or not tensors.keys() >= set(names):
            continue
        first, second = (tensors.pop(name).astype(np.float32) for name in names)
        rank = first.shape[0] if first.ndim else 0
        shapes, expected = (first.shape, second.shape), peft_shapes(weights, rank, model)
        if shapes != expected:
            raise WeightsError(
                f"{directory}: {module} has shape {_listed(shapes)}, but the served model requires "
                f"{_listed(expected)}; the adapter belongs to another model"
            )
        scaled = second * np.float32(peft_scale(config, module, rank))
        pairs = from_peft(weights, first, scaled, model)
        for path, pair in (_without_zeros(pairs) if len(pairs) > 1 else pairs).items():
            factors[path, layer] = pair
    _check_rest(directory, tensors)
    if not factors:
        raise WeightsError(f"{directory} has no LoRA factors")
    return factors


def _without_zeros(
    pairs: Mapping[str, tuple[np.ndarray, np.ndarray]],
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return factors of weights that one module packs, without ranks of the other weights."""
    kept: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for path, (first, second) in pairs.items():
        used = second.reshape(len(second), -1).any(1)
        if used.any():
            kept[path] = first[..., used], second[used]
    return kept or dict(pairs)


def _check_rest(directory: Path, tensors: Mapping[str, np.ndarray]) -> None:
    if not tensors:
        return
    names = ", ".join(name.removeprefix(PEFT_PREFIX) for name in sorted(tensors)[:3])
    if any(".lora_" in name for name in tensors):
        raise WeightsError(
            f"{directory} contains {names}, which the served model has not, or which cannot be "
            "adapted; the adapter belongs to another model, or adapts more than the matrices of "
            "attention and MLP"
        )
    raise WeightsError(
        f"{directory} contains {names}: weights that were trained in full (modules_to_save), of "
        f"which a server has only those of the base; {_MERGE}"
    )


def _read_run(name: str, directory: Path, base: ServedBase) -> NamedAdapter:
    run = RunCheckpoint(directory)
    adapter = run.program.adapter
    if adapter is None:
        raise WeightsError(
            f"{directory} trained all weights, not an adapter ([program.adapter] is not set)"
        )
    if whole := fully_trained_paths(run.model, adapter):
        raise WeightsError(
            f"{directory} trained {', '.join(whole)} in full (program.adapter.modules_to_save), of "
            f"which a server has only those of the base; {_MERGE}"
        )
    experts = [path for path in lora_paths(run.model, adapter) if is_of_experts(run.model, path)]
    if experts:
        raise WeightsError(
            f"{directory} adapts {', '.join(experts)}, and a server adapts no experts by name; "
            f"{_MERGE}"
        )
    _check_same_model(directory, run.model, base.model)
    weights = base.open_weights()
    if (file := different_base_file(weights, directory)) is not None:
        raise WeightsError(
            f"{directory} was trained on other weights than those that are served, "
            f"{weights.directory}: {file} differs; serve its base (run.init_from of its "
            "config.toml)"
        )
    factors: Factors = {}
    arrays = parameter_arrays(run.model)
    for path in lora_paths(run.model, adapter):
        names = [f"{path}/{LORA_A}", f"{path}/{LORA_B}"]
        for layer in range(arrays[path].shape[0]):
            first, second = read_in_layer(run.read, names, layer)
            factors[path, layer] = first, second * np.float32(adapter.scale)
    return NamedAdapter(name, factors, adapter.base_dtype)


def _check_same_model(directory: Path, model: Model, served: Model) -> None:
    """Raise unless two models compute the same; the vocabulary may be padded differently."""
    one, other = (
        functional_settings(replace(each, vocab=served.vocab, vocab_padding=served.vocab_padding))
        for each in (model, served)
    )
    for field in fields(one):
        ours, theirs = getattr(other, field.name), getattr(one, field.name)
        if ours != theirs:
            raise WeightsError(
                f"{directory} belongs to a model with {field.name} = {theirs}, and the served one "
                f"has {ours}"
            )


def _listed(shapes: Sequence[tuple[int, ...]]) -> str:
    return " and ".join(str(list(shape)) for shape in shapes)
