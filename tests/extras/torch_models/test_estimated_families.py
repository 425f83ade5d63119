"""Estimates of imported models count the parameters that transformers' modules have."""

import json
import math
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from graphtrain.config.resolve import resolve
from graphtrain.config.schema import Batch, Program, TorchModel, scored_layers
from graphtrain.cost_model.native_equivalent import with_native_model
from graphtrain.planning.assess import estimate
from graphtrain.torch_frontend.estimated_families import GATED, WITHOUT_GATE
from graphtrain.torch_frontend.native_equivalent import estimation_caveat, native_equivalent
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


HYBRID = transformers.Qwen3NextConfig(
    hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, vocab_size=128, moe_intermediate_size=32, num_experts=4,
    num_experts_per_tok=2, shared_expert_intermediate_size=32, linear_num_key_heads=4,
    linear_num_value_heads=8, linear_key_head_dim=16, linear_value_head_dim=16,
)  # fmt: skip
RECURRENT = transformers.Mamba2Config(
    hidden_size=64, num_hidden_layers=2, num_heads=8, head_dim=16, n_groups=2, state_size=16,
    vocab_size=128,
)  # fmt: skip


@pytest.mark.parametrize(
    ("config", "scored", "said"),
    [
        (
            HYBRID,
            0.25,
            "what 3 of 4 layers (linear_attention) compute besides projections is not counted",
        ),
        (RECURRENT, 0.0, "the width of its MLP is guessed from the weights; what 2 of 2 layers"),
    ],
)
def test_layers_without_attention_have_no_scores_and_the_state_is_that_of_the_module(
    config, scored, said, tmp_path
):
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    parameters = {id(each): each.numel() for each in module.parameters()}.values()
    model = TorchModel(hf=str(tmp_path), vocab=config.vocab_size)
    assert said in estimation_caveat(model)
    of = Program(target="h100:1", model=model, batch=Batch(global_batch_size=1, seq_len=64))
    found = estimate(resolve(of))
    assert said in " ".join(found.findings)
    layers = with_native_model(of).model
    flops = {part.name: part.model for part in found.flops}
    widths = 2 * layers.heads * layers.head_dim
    assert flops["attention scores"] == 3 * 2 * scored * layers.layers * widths * 64 * 64
    assert found.memory.parameters == pytest.approx(4 * sum(parameters), rel=0.001)
    assert found.memory.peak >= found.memory.parameters + found.memory.optimizer


def test_layers_without_attention_are_those_of_an_interval_or_unknown(tmp_path):
    """As published Qwen3-Next folders have it; of others, a finding says that it is not known."""
    HYBRID.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["layer_types"]
    model = TorchModel(hf=str(tmp_path), vocab=128)
    path.write_text(json.dumps(config | {"full_attention_interval": 2}))
    native = native_equivalent(model)
    assert native is not None and scored_layers(native) == 0.5
    path.write_text(json.dumps(config | {"full_attention_interval": None}))
    native = native_equivalent(model)
    assert native is not None and scored_layers(native) == 1.0
    assert "scores are counted in all layers" in estimation_caveat(model)


def test_models_like_their_native_equivalent_have_no_caveat(tmp_path):
    transformers.LlamaConfig(vocab_size=64).save_pretrained(tmp_path)
    assert not estimation_caveat(TorchModel(hf=str(tmp_path), vocab=64))
