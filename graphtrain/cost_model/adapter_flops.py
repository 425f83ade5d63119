"""FLOPs of the products of LoRA factors."""

from __future__ import annotations

import math

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.models.flops import Part
from graphtrain.models.lora.trainable import LORA_A, LORA_B, is_of_experts, trained_arrays


def adapter_flops_by_part(program: ResolvedProgram) -> dict[Part, float]:
    """Return the forward pass's operations per token with LoRA factors, by part of the model.

    Args:
        program: the program, whose model is native.

    Raises:
        ShardingError: a pattern of the adapter matches no eligible array.
    """
    found: dict[Part, float] = {}
    if program.adapter is None:
        return found
    model = program.model
    for path, spec in trained_arrays(program.settings).items():
        matrix, _, factor = path.rpartition("/")
        if factor not in (LORA_A, LORA_B):
            continue
        part: Part = "attention projections" if "attention" in path.split("/") else "MLP"
        share = 1.0
        if model.moe is not None and is_of_experts(model, matrix):
            share = model.moe.experts_per_token / model.moe.experts
        found[part] = found.get(part, 0.0) + 2 * share * math.prod(spec.shape)
    return found
