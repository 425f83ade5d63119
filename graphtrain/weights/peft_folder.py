"""Folders of PEFT: adapter_config.json and adapter_model.safetensors, read, checked and written.

Source: https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import TypedDict  # pydantic refuses that of typing before Python 3.12

from graphtrain.checkpoints.output_directory import create_directory
from graphtrain.errors import WeightsError
from graphtrain.files import validate
from graphtrain.weights.finite import read_finite, warn_of_not_finite
from sharding_rules.documents import read_object

ADAPTER_CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
_MAX_PATTERN, _REPEAT = 200, re.compile(r"[*+{]")  # of regular expressions of module names


class _AdapterConfig(TypedDict, total=False):
    """Types of the entries of adapter_config.json that are read."""

    peft_type: str | None
    lora_alpha: float | None
    alpha_pattern: dict[str, float] | None
    use_rslora: bool | None
    target_parameters: list[str] | None


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


def write_adapter_folder(
    destination: Path,
    tensors: Mapping[str, np.ndarray],
    config: Mapping[str, Any],
    more_files: Mapping[str, bytes] | None,
) -> None:
    """Create a folder that PEFT can load; warn of tensors with elements that are not finite.

    Args:
        destination: Folder to create.
        tensors: Tensors by name.
        config: Contents of adapter_config.json.
        more_files: Other files of the folder, by name.

    Raises:
        WeightsError: the folder exists and is not empty, or cannot be written.
    """
    from safetensors.numpy import save_file

    with create_directory(destination) as directory:
        warn_of_not_finite(tensors, destination)
        contiguous = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
        save_file(contiguous, directory / WEIGHTS, {"format": "pt"})
        (directory / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        for name, content in (more_files or {}).items():
            (directory / name).write_bytes(content)
