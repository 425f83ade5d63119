"""Reader of quantization_config, the entry of config.json that says how weights are quantized."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from graphtrain.errors import WeightsError

QUANTIZATION_CONFIG = "quantization_config"
_SUPPORTED = 'supported are "fp8", "mxfp4" and "compressed-tensors" in the format "float-quantized"'
_ADVICE = (
    "use the folder that the model's authors publish in bfloat16, or load this one with "
    "transformers, dequantize the model and save it with save_pretrained"
)


@dataclass(frozen=True)
class WeightQuantization:
    """Form in which the weights of a folder are stored.

    Source: https://huggingface.co/docs/transformers, "Fine-grained FP8" and "MXFP4"; compressed
    tensors: https://github.com/vllm-project/compressed-tensors
    """

    method: Literal["fp8", "mxfp4"]
    block: tuple[int, int] | None = None  # rows and columns of a scale; None: a tensor, or a row
    scale_suffix: str = "_scale_inv"  # of the tensor of scales, after the name of the weight
    scales_are_exponents: bool = False  # whether scales stored as integers are e8m0 exponents
    experts_are_fp4: bool = False  # whether integers with scales are pairs of e2m1 values


def read_quantization(config: Mapping[str, Any]) -> WeightQuantization | None:
    """Return how a folder's weights are quantized, or None if config.json does not say so.

    Args:
        config: config.json.

    Raises:
        WeightsError: graphtrain does not read weights that are quantized in this way.
    """
    settings = config.get(QUANTIZATION_CONFIG)
    if settings is None:
        return None
    if not isinstance(settings, Mapping):
        raise WeightsError(f"config.json: {QUANTIZATION_CONFIG} is not an object")
    method = settings.get("quant_method")
    if method == "mxfp4":
        return WeightQuantization("mxfp4")
    if method == "fp8":
        return _fine_grained(settings, config)
    if method == "compressed-tensors":
        return _compressed(settings)
    name = f"{QUANTIZATION_CONFIG}.quant_method"
    raise WeightsError(
        f"config.json: {name} = {method!r} is not supported; {_SUPPORTED}: {_ADVICE}"
    )


def _fine_grained(settings: Mapping[str, Any], config: Mapping[str, Any]) -> WeightQuantization:
    """Return the quantization of DeepSeek-V3 and kin, "fp8".

    DeepSeek-V4 states the dtype of its experts beside quantization_config.
    """
    experts = settings.get("expert_dtype", config.get("expert_dtype") or "fp8")
    for name, value, supported in (
        ("expert_dtype", experts, ("fp8", "fp4")),
        ("fmt", settings.get("fmt", "e4m3"), ("e4m3",)),
    ):
        if value not in supported:
            raise WeightsError(
                f"config.json: {QUANTIZATION_CONFIG}.{name} = {value!r} is not supported, only "
                f"{' and '.join(map(repr, supported))}: {_ADVICE}"
            )
    return WeightQuantization(
        "fp8",
        _block(settings.get("weight_block_size"), "weight_block_size"),
        scales_are_exponents=settings.get("scale_fmt") == "ue8m0",
        experts_are_fp4=experts == "fp4",
    )


def _compressed(settings: Mapping[str, Any]) -> WeightQuantization:
    """Return the quantization of folders that llm-compressor writes, if it is in fp8."""
    if (form := settings.get("format")) != "float-quantized":
        raise WeightsError(
            f"config.json: {QUANTIZATION_CONFIG}.format = {form!r} of compressed-tensors is not "
            f"supported; {_SUPPORTED}: {_ADVICE}"
        )
    for name, changes_weights in (
        ("transform_config", _is_rotated(settings.get("transform_config"))),
        ("sparsity_config", _is_sparse(settings.get("sparsity_config"))),
    ):
        if changes_weights:
            raise WeightsError(
                f"config.json: {QUANTIZATION_CONFIG}.{name} is not supported: these weights are "
                f"rotated or sparse, and others than the model's; {_ADVICE}"
            )
    groups = settings.get("config_groups")
    schemes = list(groups.values()) if isinstance(groups, Mapping) else []
    weights = [one.get("weights") if isinstance(one, Mapping) else None for one in schemes]
    blocks = {_compressed_block(one) for one in weights}
    if len(blocks) != 1:
        raise WeightsError(
            f"config.json: {QUANTIZATION_CONFIG}.config_groups is not supported, which describes "
            f"{len(blocks)} sizes of blocks; only one is: {_ADVICE}"
        )
    return WeightQuantization("fp8", blocks.pop(), scale_suffix="_scale")


def _is_rotated(transform: Any) -> bool:
    """Return whether weights are stored rotated; without a group, no weight is."""
    if isinstance(transform, Mapping) and "config_groups" in transform:
        return bool(transform["config_groups"])
    return bool(transform)


def _is_sparse(sparsity: Any) -> bool:
    """Return whether weights are stored sparse; "dense" comes with a measured sparsity."""
    if isinstance(sparsity, Mapping):
        return bool(sparsity) and sparsity.get("format", "dense") != "dense"
    return bool(sparsity)


def _compressed_block(weights: Any) -> tuple[int, int] | None:
    """Return the block of the weights of a group; None if a scale is of a tensor or a row."""
    settings = weights if isinstance(weights, Mapping) else {}
    wanted = {"num_bits": 8, "type": "float", "symmetric": True}
    strategy = settings.get("strategy")
    if strategy not in ("tensor", "channel", "block") or any(
        settings.get(name, value if name == "symmetric" else None) != value
        for name, value in wanted.items()
    ):
        described = {name: settings.get(name) for name in (*wanted, "strategy")}
        raise WeightsError(
            f"config.json: {QUANTIZATION_CONFIG}.config_groups has weights of {described}; only "
            "symmetric floats of 8 bits with the strategy tensor, channel or block are supported: "
            f"{_ADVICE}"
        )
    return (
        _block(settings.get("block_structure"), "block_structure") if strategy == "block" else None
    )


def _block(value: Any, name: str) -> tuple[int, int] | None:
    if value is None:
        return None
    is_pair = isinstance(value, list | tuple) and len(value) == 2
    if not is_pair or not all(type(size) is int and size > 0 for size in value):
        raise WeightsError(
            f"config.json: {QUANTIZATION_CONFIG}: {name} = {value!r} is not a pair of positive "
            "numbers of rows and columns"
        )
    return value[0], value[1]
