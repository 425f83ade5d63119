"""Sizes of an imported model for estimates, from its config.json."""

import json

import pytest

from graphtrain.config.resolve import resolve
from graphtrain.config.schema import Batch, Mesh, PipelineSettings, Program, TorchModel
from graphtrain.cost_model.native_equivalent import with_native_model
from graphtrain.cost_model.padded_stages import with_padding_layers
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


def in_stages(tmp_path, layers_per_stage=None, **config):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 6} | config))
    return resolve(
        Program(
            target="cpu:2",
            mesh=Mesh(stage=2),
            pipeline=PipelineSettings(layers_per_stage=layers_per_stage),
            model=TorchModel(hf=str(tmp_path), vocab=64),
            batch=Batch(global_batch_size=4, seq_len=8, microbatches=2),
        )
    )


def test_dense_layers_before_those_of_a_mixture_are_in_front_of_the_stages(tmp_path):
    mixture = {"num_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 2}
    program = in_stages(tmp_path, **mixture)
    assert program.stages.layers == (2, 2)
    native = with_native_model(program.settings).model
    assert (native.layers, native.dense_layers, native.moe.dense_mlp) == (4, 2, 48)
    assert with_padding_layers(program).model.depth == 6


def test_layers_outside_of_stages_are_useful_work_once_and_stored_by_every_device(tmp_path):
    program = in_stages(tmp_path, (3, 2))
    assert with_native_model(program.settings).model.layers == 6
    rows = 3 + 3 + 2  # of both stages with a padding row, and a copy of the layer outside for each
    assert with_padding_layers(program).model.layers == rows
