"""Import and export of PEFT adapters: adapter_config.json and adapter_model.safetensors.

Source: https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import TypedDict  # pydantic refuses that of typing before Python 3.12

from graphtrain.checkpoints.output_directory import create_directory
from graphtrain.config.schema import Adapter, Program
from graphtrain.errors import WeightsError
from graphtrain.files import validate
from graphtrain.models.lora.trainable import LORA_A, LORA_B, trained_arrays
from graphtrain.weights.convert import ConversionSummary, run_of_imported_model
from graphtrain.weights.expert_factors import (
    config_of_experts,
    expert_modules,
    expert_parameters,
    expert_tensors,
    from_peft_experts,
    parameter_names,
)
from graphtrain.weights.factors import (
    EMBEDDING,
    AdapterTable,
    from_peft,
    input_axes,
    module_of,
    peft_shapes,
    rank_axis,
    read_in_layer,
    to_peft,
    weights_of_layers,
)
from graphtrain.weights.families.family import (
    LayerWeights,
    array_shape,
    to_decoder,
    to_hugging_face,
)
from graphtrain.weights.finite import read_finite, warn_of_not_finite
from graphtrain.weights.sources import RunCheckpoint, checkpoint_step
from sharding_rules.documents import read_object

ADAPTER_CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
# Modules that PEFT 0.21 takes for those of single experts, in most models with experts.
_NAMES_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj")
_MAX_PATTERN, _REPEAT = 200, re.compile(r"[*+{]")  # of regular expressions of module names


class _AdapterConfig(TypedDict, total=False):
    """Types of the entries of adapter_config.json that are read."""

    peft_type: str | None
    lora_alpha: float | None
    alpha_pattern: dict[str, float] | None
    use_rslora: bool | None
    target_parameters: list[str] | None


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
    tensors: dict[str, np.ndarray] = {}
    for layer_weights in table.adapted_weights():
        paths = [path for path in layer_weights.row.paths if path in table.targets]
        names = [f"{path}/{name}" for path in paths for name in (LORA_A, LORA_B)]
        factors = read_in_layer(read, names, layer_weights.layer)
        pairs = dict(zip(paths, zip(factors[::2], factors[1::2], strict=True), strict=True))
        tensors |= _named_factors(layer_weights, *to_peft(layer_weights, pairs, table.model))
    tensors |= {PEFT_PREFIX + name: one for name, one in expert_tensors(table, read).items()}
    for layer_weights in table.fully_trained_weights():
        arrays = read(layer_weights.row.paths, layer_weights.layer)
        unpadded = [
            array[tuple(slice(size) for size in array_shape(path, table.model))]
            for path, array in zip(layer_weights.row.paths, arrays, strict=True)
        ]
        for name, tensor in to_hugging_face(layer_weights, unpadded, table.model):
            tensors[PEFT_PREFIX + name] = tensor
            if layer_weights.row.paths == (EMBEDDING,) and (head := table.tie_word_embeddings):
                tensors[PEFT_PREFIX + head] = tensor
    with create_directory(destination) as directory:
        from safetensors.numpy import save_file

        warn_of_not_finite(tensors, destination)
        contiguous = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
        save_file(contiguous, directory / WEIGHTS, {"format": "pt"})
        (directory / ADAPTER_CONFIG).write_text(json.dumps(_config(table), indent=2) + "\n")
        for name, content in (more_files or {}).items():
            (directory / name).write_bytes(content)
    count = sum(tensor.size for tensor in tensors.values())
    return ConversionSummary(table.family.model_type, count, len(tensors), "float32")


class PeftAdapter:
    """Adapter saved by PEFT, converted to the program's trainable arrays by path.

    Raises:
        WeightsError: the adapter does not match [program.adapter], or is of an unsupported kind.
    """

    def __init__(self, directory: Path, program: Program, side: Path) -> None:
        assert program.adapter is not None
        self.directory, self.adapter = directory, program.adapter
        self._table = AdapterTable.from_folder(side, program.model, program.adapter)
        has_experts = bool(expert_parameters(self._table))
        self.config = read_adapter_config(directory, allow_parameters=has_experts)
        self._tensors = load_adapter_tensors(directory)
        self.arrays = self._stack(program)
        if self._tensors:
            raise WeightsError(
                f"{directory} also contains {', '.join(sorted(self._tensors)[:3])}, which "
                "[program.adapter] does not train; add them to its target_modules or "
                "modules_to_save"
            )

    def _stack(self, program: Program) -> dict[str, np.ndarray]:
        specs = trained_arrays(program)
        arrays = {path: np.zeros(spec.shape, np.float32) for path, spec in specs.items()}
        for layer_weights in self._table.adapted_weights():
            for path, (lora_a, lora_b) in self._pairs(layer_weights).items():
                arrays[f"{path}/{LORA_A}"][layer_weights.layer] = lora_a
                arrays[f"{path}/{LORA_B}"][layer_weights.layer] = lora_b
        for layer, path, (lora_a, lora_b) in self._expert_pairs(program):
            arrays[f"{path}/{LORA_A}"][layer] = lora_a
            arrays[f"{path}/{LORA_B}"][layer] = lora_b
        for layer_weights in self._table.fully_trained_weights():
            tensors = [self._pop_tensor(name, PEFT_PREFIX + name) for name in layer_weights.names]
            if layer_weights.row.paths == (EMBEDDING,):
                self._drop_head(tensors[0])
            model = self._table.model
            empty = [
                np.zeros(array_shape(path, model), np.int8) for path in layer_weights.row.paths
            ]
            expected_shapes = [
                tensor.shape for _, tensor in to_hugging_face(layer_weights, empty, model)
            ]
            self._check_shapes(", ".join(layer_weights.names), tensors, expected_shapes)
            decoded = to_decoder(layer_weights, tensors, model)
            for path, array in zip(layer_weights.row.paths, decoded, strict=True):
                layer = layer_weights.layer
                destination = arrays[path] if layer is None else arrays[path][layer]
                # Rows of vocabulary padding stay zero.
                destination[tuple(map(slice, array.shape))] = array
        return arrays

    def _drop_head(self, embedding: np.ndarray) -> None:
        """Discard the copy of the embedding that PEFT saves for a tied LM head."""
        head = self._table.tie_word_embeddings
        copy = None if head is None else self._tensors.pop(PEFT_PREFIX + head, None)
        if copy is not None and not np.array_equal(copy, embedding):
            raise WeightsError(
                f"{self.directory}: {head} differs from the embedding, but config.json ties them"
            )

    def _pairs(self, layer_weights: LayerWeights) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Return both LoRA factors of each adapted weight of one row, by path."""
        module = module_of(layer_weights)
        lora_a = self._pop_tensor(module, f"{PEFT_PREFIX}{module}.lora_A.weight")
        lora_b = self._pop_tensor(module, f"{PEFT_PREFIX}{module}.lora_B.weight")
        rank, count = self.adapter.rank, lora_a.shape[0] if lora_a.ndim else 0
        self._check_shapes(
            module, [lora_a, lora_b], peft_shapes(layer_weights, count, self._table.model)
        )
        targets = [path for path in layer_weights.row.paths if path in self._table.targets]
        if count not in (rank, rank * len(targets)):
            raise WeightsError(
                f"{self.directory}: {module} has rank {count}, but program.adapter.rank = {rank}; "
                f"set it to {count}"
            )
        scale_ratio = peft_scale(self.config, module, count) / self.adapter.scale
        lora_b = lora_b * np.float32(scale_ratio) if scale_ratio != 1 else lora_b
        pairs = {}
        for index, path in enumerate(targets):
            rank_slice = slice(None) if count == rank else slice(index * rank, (index + 1) * rank)
            converted = from_peft(
                layer_weights, lora_a[rank_slice], lora_b[:, rank_slice], self._table.model
            )
            other_paths = set(converted) - {path}
            separate = count != rank or len(targets) < len(converted)
            if separate and any(
                converted[other_path][1].any() for other_path in other_paths - set(targets)
            ):
                raise WeightsError(
                    f"{self.directory}: {module} also adapts {', '.join(sorted(other_paths))}; "
                    "add them to program.adapter.target_modules"
                )
            if count != rank and any(converted[other_path][1].any() for other_path in other_paths):
                raise WeightsError(
                    f"{self.directory}: {module} packs {len(converted)} weights that share their "
                    f"LoRA factors; set program.adapter.rank = {count}"
                )
            pairs[path] = converted[path]
        return pairs

    def _expert_pairs(
        self, program: Program
    ) -> Iterator[tuple[int, str, tuple[np.ndarray, np.ndarray]]]:
        """Yield both LoRA factors of the adapted weights of experts, by layer and path."""
        parameters = expert_parameters(self._table)
        mixture = program.model.moe
        for layer, module in expert_modules(self._table).items():
            assert mixture is not None
            for parameter, wrapper in parameter_names(module, list(parameters)).items():
                a, b = (
                    self._pop_tensor(module, f"{PEFT_PREFIX}{wrapper}.lora_{name}.weight")
                    for name in "AB"
                )
                scale = peft_scale(self.config, f"{module}.{parameter}", len(a) // mixture.experts)
                if (ratio := scale / self.adapter.scale) != 1:
                    b = b * np.float32(ratio)
                paths = parameters[parameter]
                pairs = from_peft_experts(parameter, paths, a, b, self._table)
                for path, pair in pairs.items():
                    yield layer, path, pair

    def _check_shapes(
        self, name: str, tensors: list[np.ndarray], expected: Sequence[tuple[int, ...]]
    ) -> None:
        shapes = [tensor.shape for tensor in tensors]
        if shapes != list(expected):
            raise WeightsError(
                f"{self.directory}: {name} has shape {_format_shapes(shapes)}, but program.model "
                f"requires {_format_shapes(expected)}; the adapter belongs to another model"
            )

    def _pop_tensor(self, module: str, name: str) -> np.ndarray:
        if name not in self._tensors:
            raise WeightsError(
                f"{self.directory} has no {name}, but [program.adapter] trains {module}; remove it "
                "from target_modules or modules_to_save"
            )
        return self._tensors.pop(name).astype(np.float32)


def _format_shapes(shapes: Sequence[tuple[int, ...]]) -> str:
    return " and ".join(str(list(shape)) for shape in shapes)


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


def split_targets(modules: Sequence[str], *, has_experts: bool) -> tuple[list[str], list[str]]:
    """Return names of linear layers as target_modules and as target_parameters of PEFT.

    In a model with experts, PEFT takes the name of a dense layer or of a shared expert for that of
    an expert, and adapts the experts in its place. It adapts what is named as a parameter.
    """
    as_parameters = [
        name for name in modules if has_experts and name.rpartition(".")[2] in _NAMES_OF_EXPERTS
    ]
    others = [name for name in modules if name not in as_parameters]
    return others, [f"{name}.weight" for name in as_parameters]


def common_config(adapter: Adapter, *, has_parameters: bool) -> dict[str, Any]:
    """Return what PEFT's configuration says of an adapter, whatever the model.

    PEFT has no dropout of target_parameters, and loads no configuration with both.
    """
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "use_rslora": adapter.use_rslora,
        "lora_dropout": 0.0 if has_parameters else adapter.dropout,
        "bias": "none",
        "inference_mode": True,
    }


def name_within_layer(module: str) -> str:
    """Return a module's name within its layer; the full name for a module outside the layers."""
    in_layer = re.fullmatch(r".*?\.\d+\.(.*)", module)
    return in_layer[1] if in_layer else module


def read_adapter_config(directory: Path, *, allow_parameters: bool = False) -> dict[str, Any]:
    """Read the adapter_config.json of a folder that PEFT saved.

    Args:
        directory: The folder.
        allow_parameters: Whether it may adapt bare parameters, as those of experts.

    Raises:
        WeightsError: it cannot be read, or the adapter is of an unsupported kind.
    """
    path = directory / ADAPTER_CONFIG
    try:
        config = read_object(path)
        validate(_AdapterConfig, config)
        for name in config.get("alpha_pattern") or {}:
            _check_pattern(name)
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} cannot be read: {error}") from error
    refused = {
        "peft_type": config.get("peft_type") != "LORA",
        "use_dora": config.get("use_dora"),
        "bias": config.get("bias", "none") != "none",
        "lora_bias": config.get("lora_bias"),
        "target_parameters": not allow_parameters
        and any(not name.endswith(".weight") for name in config.get("target_parameters") or []),
        "trainable_token_indices": config.get("trainable_token_indices"),
        "alora_invocation_tokens": config.get("alora_invocation_tokens"),  # only after these tokens
        "arrow_config": config.get("arrow_config"),  # chooses among adapters by token
    }
    for setting, is_refused in refused.items():
        if is_refused:
            raise WeightsError(f"{path}: {setting} = {config.get(setting)!r} is not supported")
    if _changes_base(initial := config.get("init_lora_weights")):
        raise WeightsError(
            f"{path}: init_lora_weights = {initial!r} changes the base weights; save the adapter "
            "with path_initial_model_for_weight_conversion of PEFT's save_pretrained, for those "
            "that were not changed"
        )
    return config


def _changes_base(initial: Any) -> bool:
    """Return whether PEFT changes the base weights as it adds factors, also to load them."""
    return isinstance(initial, str) and initial.lower().startswith(
        ("pissa", "olora", "corda", "loftq")
    )


def _check_pattern(name: str) -> None:
    """Raise ValueError unless this regular expression of module names is valid and quickly matched.

    Matching takes exponential time for some repetitions of groups, and a power of the length of the
    module's name for several repetitions.
    """
    if len(name) > _MAX_PATTERN or re.search(r"\)[*+?{]", name) or len(_REPEAT.findall(name)) > 3:
        raise ValueError(f"alpha_pattern: {name[:80]!r} repeats groups or has over 3 repetitions")
    try:
        re.compile(name)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"alpha_pattern: {name[:80]!r} is not a pattern: {error}") from None


def peft_scale(config: dict[str, Any], module: str, rank: int) -> float:
    """Return the factor by which PEFT scales the product of a module's LoRA factors."""

    def pattern(setting: str, default: Any) -> Any:
        for name, value in (config.get(setting) or {}).items():
            if re.match(rf"(.*\.)?({name})$", module):
                return value
        return default

    alpha = pattern("alpha_pattern", config.get("lora_alpha"))
    if not isinstance(alpha, int | float):
        raise WeightsError(f"{ADAPTER_CONFIG}: lora_alpha = {alpha!r} of {module} is not a number")
    return alpha / (rank**0.5 if config.get("use_rslora") else rank)


def load_adapter_tensors(directory: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a folder that PEFT saved, by name.

    Raises:
        WeightsError: there is no file of them, or it is damaged or has values that are not finite.
    """
    from graphtrain.weights.files import SafetensorsFiles

    path = directory / WEIGHTS
    if not path.is_file():
        raise WeightsError(f"{path} does not exist; write it with PEFT's save_pretrained")
    folder = SafetensorsFiles([path])
    return {name: read_finite(folder, name) for name in folder.names}
