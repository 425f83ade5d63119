"""Settings of adapter_config.json that adapters of all kinds of models share."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from graphtrain.config.schema import Adapter

# Modules that PEFT 0.21 takes for those of single experts, in most models with experts.
_NAMES_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj")


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
