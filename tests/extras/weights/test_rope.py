"""RoPE scaling: frequencies, logits and config.json equal those of transformers."""

import json
import math

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from graphtrain.config.schema import RopeScaling
from graphtrain.models.attention.rope_scaling import attention_factor, scaled_frequencies
from graphtrain.weights.families.llama import LLAMA

HALF, ORIGINAL = 16, 64
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1 + 0.05 * index for index in range(HALF)],
    "long_factor": [1 + 1.7 * index for index in range(HALF)],
    "original_max_position_embeddings": ORIGINAL,
}
# Entries as published: Qwen2.5, gpt-oss, DeepSeek-V2, Phi-3, and dynamic NTK of InternLM.
PUBLISHED = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": YARN,
    "yarn, not rounded": YARN | {"truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
    "yarn, mscale": YARN | {"mscale": 0.707, "mscale_all_dim": 0.5, "beta_fast": 16},
    "yarn, attention_factor": YARN | {"attention_factor": 1.25},
    "longrope": LONGROPE,
    "longrope, factor": LONGROPE | {"factor": 8.0},
    "llama3": YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}


def config_of(entries: dict, **more) -> transformers.LlamaConfig:
    # Dynamic scaling begins at max_position_embeddings; others were extended to it.
    longest = ORIGINAL if entries["rope_type"] == "dynamic" else 4 * ORIGINAL
    return transformers.LlamaConfig(
        **{"hidden_size": 64, "head_dim": 2 * HALF, "intermediate_size": 64, "vocab_size": 97}
        | {"num_hidden_layers": 2, "num_attention_heads": 2, "initializer_range": 0.2}
        | {"max_position_embeddings": longest, "rope_parameters": {"rope_theta": 5e4, **entries}}
        | more
    )


def scaling_of(entries: dict) -> RopeScaling:
    scaling = LLAMA.model_from_config(config_of(entries).to_dict()).rope_scaling
    assert scaling is not None
    return scaling


@pytest.mark.parametrize("length", [ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, 7 * ORIGINAL])
@pytest.mark.parametrize("name", PUBLISHED)
def test_frequencies_are_those_of_transformers(name, length):
    entries = PUBLISHED[name]
    initialize = ROPE_INIT_FUNCTIONS[entries["rope_type"]]
    want, factor = initialize(config_of(entries), torch.device("cpu"), seq_len=length)
    scaling = scaling_of(entries)
    got = scaled_frequencies(5e4, HALF, scaling, length)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want.numpy(), rtol=2e-6)
    assert math.isclose(attention_factor(scaling), factor, rel_tol=1e-12)


@pytest.mark.parametrize(
    "entries",
    [
        {"rope_scaling": {"type": "linear", "factor": 8.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7e3}},
        {"rope_scaling": {"type": "linear", "factor": 8.0}, "rope_theta": 3e4},
        {"rope_theta": 3e4},
    ],
)
def test_of_old_and_new_entries_those_count_that_transformers_reads(entries):
    both = {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e4}} | entries
    want = transformers.LlamaConfig(**both).rope_parameters
    model = LLAMA.model_from_config(config_of(PUBLISHED["linear"]).to_dict() | both)
    assert model.rope_scaling is not None
    assert (model.rope_theta, model.rope_scaling.factor) == (want["rope_theta"], want["factor"])


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_config_comes_back_with_the_same_numbers(name):
    config = config_of(PUBLISHED[name])
    model = LLAMA.model_from_config(config.to_dict())
    written = json.loads(json.dumps(config.to_dict() | LLAMA.config_from_model(model)))
    again = transformers.LlamaConfig(**written)
    assert again.max_position_embeddings == config.max_position_embeddings
    ours, theirs = again.rope_parameters, config.rope_parameters
    assert {name: ours[name] for name in theirs} == theirs
    assert LLAMA.model_from_config(written) == model


def test_older_names_and_places_of_the_entries():
    """Phi-3's config.json: type su, the original length beside it, and no factor."""
    entries = {name: LONGROPE[name] for name in ("short_factor", "long_factor")}
    config = config_of(LONGROPE).to_dict()
    del config["rope_parameters"]
    config |= {"rope_scaling": {"type": "su", **entries}, "rope_theta": 1e4}
    config |= {"original_max_position_embeddings": ORIGINAL}
    scaling = LLAMA.model_from_config(config).rope_scaling
    assert scaling == scaling_of(LONGROPE)
    assert scaling.factor == 4.0
