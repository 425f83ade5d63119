"""Folders of mixtures of experts, read as the modules of transformers name their arrays."""

from types import SimpleNamespace

import numpy as np
import pytest
import transformers

from graphtrain.weights.imported_folder import HuggingFaceWeights
from lowering.trees import flatten, unflatten

SIZES = {
    "vocab_size": 40,
    "hidden_size": 8,
    "intermediate_size": 12,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
MODELS = {
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=3),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SIZES, num_experts=3, head_dim=4),
}


@pytest.mark.parametrize("name", MODELS)
def test_experts_that_are_stored_one_by_one_are_those_of_the_module(name, tmp_path):
    model = transformers.AutoModelForCausalLM.from_config(MODELS[name]())
    model.save_pretrained(tmp_path)
    weights = {key: array.numpy() for key, array in model.state_dict().items()}
    want = {
        f"model/layers/mlp/{part.replace('.', '/')}": np.stack(
            [weights[f"model.layers.{row}.mlp.{part}"] for row in range(2)]
        )
        for part in ("experts.gate_up_proj", "experts.down_proj", "gate.weight")
    }

    def fill(tree, read):
        """Read the first columns, of some experts after the other, as shards are read."""
        return unflatten(
            {path: parts(path, one.shape, read) for path, one in flatten(tree).items()}
        )

    def parts(path, shape, read):
        inner = *[slice(None)] * (len(shape) - 3), slice(0, 5)
        experts = slice(0, 1), slice(1, 3)
        return np.concatenate(
            [read(path, shape, (slice(None), chosen, *inner)) for chosen in experts], 1
        )

    described = {path: SimpleNamespace(shape=array.shape) for path, array in want.items()}
    read = HuggingFaceWeights(tmp_path).parameters(unflatten(described), fill)
    for path, array in flatten(read).items():
        np.testing.assert_array_equal(array, want[path][..., :5])
