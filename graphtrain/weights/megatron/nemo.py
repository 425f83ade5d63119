"""NeMo's description of a model, as the arguments of Megatron-LM, and its files of ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from graphtrain.errors import WeightsError
from graphtrain.weights.files import WeightFiles
from graphtrain.weights.megatron.arguments import SUPPORTED_VALUES, Arguments

CONFIG = "model_config.yaml"  # in a .nemo archive
_NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm", "layernorm1p": "LayerNorm"}
_ACTIVATIONS = ("gelu", "swiglu", "fast-swiglu")
_MOST_BYTES = 1 << 20  # of a configuration
# Entries whose other values compute another function.
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "apply_embedding_scaling": (False,),
    "drop_layers": ([],),
    "embedding_scale": (1,),
    "headscale": (False,),
    "high_freq_factor": (4,),
    "low_freq_factor": (1,),
    "megatron_legacy": (False,),
    "normalize_attention_scores": (True,),
    "old_context_len": (8192,),
    "transformer_block_type": ("pre_ln",),
}
# Entries that have the same name and meaning as arguments of Megatron-LM; NeMo copies all that
# megatron-core's TransformerConfig has.
_SAME = (
    *SUPPORTED_VALUES,
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "kv_channels",
    "num_query_groups",
    "max_position_embeddings",
    "position_embedding_type",
    "rotary_base",
    "openai_gelu",
    "qk_layernorm",
    "window_size",
    "moe_ffn_hidden_size",
    "moe_router_load_balancing_type",
    "moe_router_pre_softmax",
    "moe_router_topk",
    "moe_shared_expert_gate",
    "moe_shared_expert_intermediate_size",
)


def read_nemo_config(path: Path) -> Arguments:
    """Read a model_config.yaml or hparams.yaml of NeMo 1 as arguments of Megatron-LM.

    Raises:
        WeightsError: the file is no such configuration, or the decoder does not support an entry.
    """
    if not path.is_file():
        raise WeightsError(f"{path} is no file")
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES} bytes")
        config = _resolve(_model_table(yaml.safe_load(content)))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise WeightsError(f"{path} is not a configuration of NeMo: {error}") from error
    for name, values in _SUPPORTED.items():
        if (value := config.get(name)) is not None and value not in values:
            raise WeightsError(
                f"{path}: {name} = {value!r} is not supported, only {values[0]!r} is"
            )
    try:
        return _arguments(config)
    except ValueError as error:
        raise WeightsError(f"{path}: {error}") from error


def _model_table(config: Any) -> dict[str, Any]:
    """Return the table of the model: in hparams.yaml it is `cfg`, in others the file or `model`."""
    for name in ("cfg", "model"):
        if isinstance(config, dict) and isinstance(config.get(name), dict):
            config = config[name]
    if not isinstance(config, dict) or "num_layers" not in config:
        raise ValueError("it has no num_layers")
    if changes := config.get("mcore_customization_config"):
        raise ValueError(
            f"mcore_customization_config = {str(changes)[:200]} is not supported, because it sets "
            "attributes of megatron-core's configuration"
        )
    return config


def _resolve(config: dict[str, Any]) -> dict[str, Any]:
    """Return the table with references such as ${.encoder_seq_length} replaced by their values."""

    def value(name: str, depth: int = 0) -> Any:
        entry = config.get(name)
        items = entry if isinstance(entry, list) else [entry]
        if any(isinstance(item, list | dict) for item in items):
            raise ValueError(f"{name} is a table or contains one")
        if not isinstance(entry, str) or "${" not in entry:
            return entry
        found = re.fullmatch(r"\$\{(?:\.|model\.)(\w+)\}", entry)
        if found is None or depth > len(config):
            raise ValueError(f"{name} = {entry} cannot be resolved; replace it by its value")
        return value(found[1], depth + 1)

    read = {*_SAME, *_SUPPORTED, *_READ}
    return {name: value(name) for name in config if name in read}


_READ = (
    "activation",
    "bias",
    "bias_activation_fusion",
    "bias_gelu_fusion",
    "ffn_hidden_size",
    "layernorm_epsilon",
    "layernorm_zero_centered_gamma",
    "mcore_gpt",
    "normalization",
    "num_moe_experts",
    "qkv_bias",
    "rotary_percentage",
    "scale_factor",
    "scale_positional_embedding",
    "seq_len_interpolation_factor",
    "share_embeddings_and_output_weights",
)


def _arguments(config: Mapping[str, Any]) -> Arguments:
    def entry(name: str, default: Any) -> Any:
        return default if config.get(name) is None else config[name]

    activation = entry("activation", "gelu")
    norm = str(entry("normalization", "layernorm")).lower()
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation = {activation!r} is not one of {', '.join(_ACTIVATIONS)}")
    if norm not in _NORMS:
        raise ValueError(f"normalization = {norm!r} is not one of {', '.join(_NORMS)}")
    zero_centered = entry("layernorm_zero_centered_gamma", False)
    if zero_centered and not entry("mcore_gpt", False):
        raise ValueError(
            "layernorm_zero_centered_gamma = True needs mcore_gpt = True; NeMo ignores it otherwise"
        )
    older = entry("bias_gelu_fusion", True)  # its name in older NeMo
    fusion = entry("bias_activation_fusion", older)
    if activation == "gelu" and fusion != entry("bias_gelu_fusion", fusion):
        raise ValueError(
            f"bias_activation_fusion = {fusion} contradicts bias_gelu_fusion = {older}; keep the "
            "one with which the model was trained"
        )
    groups, heads = config.get("num_query_groups"), config.get("num_attention_heads")
    arguments = {name: config[name] for name in _SAME if config.get(name) is not None}
    return arguments | {
        "ffn_hidden_size": entry("ffn_hidden_size", 4 * entry("hidden_size", 0)),
        "group_query_attention": groups not in (None, heads),
        "untie_embeddings_and_output_weights": not entry(
            "share_embeddings_and_output_weights", True
        ),
        "normalization": _NORMS[norm],
        "apply_layernorm_1p": norm == "layernorm1p" or bool(zero_centered),
        "norm_epsilon": entry("layernorm_epsilon", 1e-5),
        "add_bias_linear": entry("bias", True),
        "add_qkv_bias": entry("qkv_bias", False),
        "swiglu": activation.endswith("swiglu"),
        "bias_gelu_fusion": fusion,
        "rotary_percent": entry("rotary_percentage", 1.0),
        "rotary_seq_len_interpolation_factor": config.get("seq_len_interpolation_factor"),
        "use_rope_scaling": entry("scale_positional_embedding", False),
        "rope_scaling_factor": config.get("scale_factor"),
        "num_experts": config.get("num_moe_experts"),
    }


class JoinedGates:
    """Weights in which gate and up are one array, of files in which they are two.

    NeMo without megatron-core, also on Neuron, stores dense_h_to_4h and dense_h_to_4h_2.
    """

    def __init__(self, files: WeightFiles) -> None:
        self._files = files

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in self._files.names if ".linear_fc1_up." not in name)

    def dtype(self, name: str) -> np.dtype:
        return self._files.dtype(name)

    def shape(self, name: str) -> tuple[int, ...]:
        rows, *others = self._files.shape(name)
        return (2 * rows, *others) if ".linear_fc1." in name else (rows, *others)

    def read(self, name: str) -> np.ndarray:
        if ".linear_fc1." not in name:
            return self._files.read(name)
        up = name.replace(".linear_fc1.", ".linear_fc1_up.")
        if up not in self._files.names:
            raise WeightsError(f"the checkpoint lacks {up}, which other layers have")
        return np.concatenate([self._files.read(name), self._files.read(up)])
