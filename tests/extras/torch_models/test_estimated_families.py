"""Estimates of imported models count the parameters that transformers' modules have."""

import math
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from graphtrain.config.schema import TorchModel
from graphtrain.torch_frontend.estimated_families import GATED, WITHOUT_GATE
from graphtrain.torch_frontend.native_equivalent import native_equivalent
from graphtrain.weights.families.family import parameter_arrays

SAMPLE = [
    "bert", "deepseek_v3", "ernie4_5_moe", "glm4_moe", "gpt2", "gpt_oss", "llama", "minimax_m2",
    "mixtral", "nanochat", "qwen2_moe", "qwen3_moe", "qwen3_next",
]  # fmt: skip


def equivalent(config, path, *, build=False):
    config.save_pretrained(path)
    return native_equivalent(TorchModel(hf=str(path), vocab=config.vocab_size), build=build)


@pytest.mark.parametrize("family", SAMPLE)
def test_parameters_are_those_of_the_module(family, tmp_path):
    config = AutoConfig.for_model(family)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    expected = sum(parameter.numel() for parameter in module.parameters())
    native = equivalent(config, tmp_path)
    assert native is not None
    arrays = parameter_arrays(native).values()
    assert sum(math.prod(array.shape) for array in arrays) == pytest.approx(expected, rel=0.05)


def test_all_names_are_families_of_transformers():
    known = {config.model_type for config in transformers.MODEL_FOR_CAUSAL_LM_MAPPING}
    assert known >= GATED | WITHOUT_GATE
    assert not GATED & WITHOUT_GATE


def test_a_mixture_that_a_native_model_cannot_describe_is_unknown(tmp_path):
    sizes: dict[str, Any] = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8,
    }  # fmt: skip
    every = transformers.Qwen3MoeConfig(**sizes)
    native = equivalent(every, tmp_path)
    assert native is not None
    assert native.mlp == 16
    alternating = transformers.Qwen3MoeConfig(**sizes, decoder_sparse_step=2)
    assert equivalent(alternating, tmp_path) is None
    assert equivalent(alternating, tmp_path, build=True) is None
