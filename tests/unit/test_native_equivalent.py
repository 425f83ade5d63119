"""Sizes of an imported model for estimates, from its config.json."""

import json
from dataclasses import replace

import pytest

from graphtrain.config.resolve import resolve
from graphtrain.config.schema import (
    Batch,
    Loss,
    Mesh,
    Model,
    PipelineSettings,
    Precision,
    Program,
    TorchModel,
)
from graphtrain.cost_model.memory import memory
from graphtrain.cost_model.native_equivalent import sizes_unknown, with_native_model
from graphtrain.cost_model.padded_stages import with_padding_layers
from graphtrain.errors import PlanError
from graphtrain.models.mlp_block_count import mlp_block_count
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


def in_stages(tmp_path, layers_per_stage=None, microbatches=2, **config):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 6} | config))
    return resolve(
        Program(
            target="cpu:2",
            mesh=Mesh(stage=2),
            pipeline=PipelineSettings(layers_per_stage=layers_per_stage),
            model=TorchModel(hf=str(tmp_path), vocab=64),
            batch=Batch(global_batch_size=2 * microbatches, seq_len=8, microbatches=microbatches),
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


def test_dense_layers_in_front_save_activations_of_all_microbatches_of_a_stage(tmp_path):
    def growth(**config):
        """Bytes by which activations grow from 2 to 16 microbatches of the same size."""
        one, many = (
            memory(with_padding_layers(in_stages(tmp_path, microbatches=count, **config)))
            for count in (2, 16)
        )
        return many.activations - one.activations

    mixture = {"n_routed_experts": 4, "num_experts_per_tok": 2, "model_type": "deepseek_v3"}
    more = growth(**mixture, first_k_dense_replace=2) - growth(**mixture)
    hidden_state = 2 * 8 * 32 * 2  # bytes of a microbatch: rows, positions, width, bfloat16
    assert more > 2 * (16 - 2) / 2 * hidden_state


def test_layers_outside_of_stages_save_activations_of_all_microbatches_of_a_stage(tmp_path):
    def saved(count, layers):
        program = in_stages(tmp_path, layers, microbatches=count)
        return memory(with_padding_layers(program)).activations

    few, many = (saved(count, (2, 2)) - saved(count, (3, 3)) for count in (2, 16))
    hidden_state = 2 * 8 * 32 * 2  # bytes of a microbatch: rows, positions, width, bfloat16
    assert many - few >= 2 * (16 - 2) / 2 * hidden_state


def test_the_newest_gradients_of_an_imported_model_exist_beside_the_sums(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    batch = Batch(global_batch_size=8, seq_len=8, microbatches=4)
    imported = Program(model=TorchModel(hf=str(tmp_path), vocab=64), batch=batch, target="cpu:1")
    native = with_padding_layers(resolve(imported))
    assert native.settings.loss.chunk == "none"
    of_native = replace(native, stands_for_imported=False)
    assert memory(native).gradients > 1.2 * memory(of_native).gradients


def test_estimates_of_imported_models_have_nothing_that_only_native_models_do():
    wide = Model(layers=4, embed=4096, heads=32, mlp=11008, vocab=32000, remat="full")
    batch = Batch(global_batch_size=128, seq_len=4096)
    on_gpus = Program(
        model=wide, batch=batch, target="h100:64", mesh=Mesh(fsdp=64), rules=("fsdp",)
    )
    native = resolve(on_gpus)
    assert mlp_block_count(native) > 1
    assert mlp_block_count(replace(native, stands_for_imported=True)) == 1
    narrow = replace(wide, embed=1024, heads=16, kv_heads=16, head_dim=64, remat="dots")
    on_tpus = resolve(replace(on_gpus, model=narrow, target="v5e:8x8"))
    padded = replace(on_tpus, stands_for_imported=True)
    # Queries, keys, values and attention's output of 2 x 4,096 tokens: heads of 64 take 128.
    padding = narrow.layers * 2 * 4096 * 4 * narrow.heads * 64 * 2
    assert memory(padded).activations - memory(on_tpus).activations == padding


def test_logits_of_an_imported_model_are_in_its_dtype_on_gpus():
    """As compiled for h100:8: the head returns bfloat16, and no float32 logits exist."""
    model = Model(layers=2, embed=256, heads=4, mlp=512, vocab=32000, remat="full")
    of = Program(model=model, batch=Batch(global_batch_size=8, seq_len=2048), target="h100:1")
    native = resolve(replace(of, loss=Loss(chunk="none")))
    logits = 8 * 2048 * 32000
    peaks = [memory(replace(native, stands_for_imported=one)).peak for one in (False, True)]
    assert peaks[0] - peaks[1] == 2 * logits


def test_a_native_model_that_does_not_support_the_settings_of_a_program_is_no_estimate(tmp_path):
    latents = {"kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | latents))
    model = TorchModel(hf=str(tmp_path), vocab=64)
    program = Program(model=model, batch=Batch(global_batch_size=4, seq_len=8), target="cpu:1")
    assert not sizes_unknown(program)
    in_8_bits = replace(program, precision=Precision(compute="int8"))
    assert sizes_unknown(in_8_bits)
    with pytest.raises(PlanError, match="latent attention with products in 8 bits"):
        with_native_model(in_8_bits)
