"""Sizes of an imported model for estimates, from its config.json."""

import json

import pytest

from graphtrain.config.schema import TorchModel
from graphtrain.torch_frontend.native_equivalent import native_equivalent

CONFIG = {
    "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48, "vocab_size": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"num_key_value_heads": 2**31},
        {"head_dim": "x"},
        {"num_experts": 4, "num_experts_per_tok": 9},
    ],
)
def test_sizes_that_no_native_model_has_are_unknown(change, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    model = TorchModel(hf=str(tmp_path), vocab=64)
    assert native_equivalent(model).embed == 32
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | change))
    assert native_equivalent(model) is None
