"""Names of settings from other tools, and from earlier versions, are answered with ours."""

import pytest

from graphtrain.config import load_config
from graphtrain.config.foreign_names import _CONVERSIONS, _SETTING_OF, NAMES_OF
from graphtrain.config.settings import known_settings
from graphtrain.errors import ConfigError

FILE = """
[program]
target = "cpu:1"
[program.model]
layers = 2
embed = 64
heads = 4
mlp = 128
vocab = 256
[program.batch]
global_batch_size = 8
seq_len = 128
[run]
directory = "runs/one"
steps = 10
[run.data]
train = "data/train"
"""


@pytest.fixture
def refuse(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(FILE)

    def refused(*overrides):
        with pytest.raises(ConfigError) as caught:
            load_config(path, overrides)
        return str(caught.value)

    return refused


def test_every_foreign_name_means_a_setting_and_only_one():
    names = [name for names in NAMES_OF.values() for name in names.split()]
    assert len(names) == len(set(names)) >= 60
    assert set(_SETTING_OF.values()) <= set(known_settings())


BROUGHT = {
    "hidden_size": "program.model.embed",
    "num_hidden_layers": "program.model.layers",
    "n_layer": "program.model.layers",
    "num_attention_heads": "program.model.heads",
    "num_key_value_heads": "program.model.kv_heads",
    "intermediate_size": "program.model.mlp",
    "vocab_size": "program.model.vocab",
    "rms_norm_eps": "program.model.norm_epsilon",
    "gradient_checkpointing": "program.model.remat",
    "tp": "program.mesh.tensor",
    "tensor_model_parallel_size": "program.mesh.tensor",
    "pp": "program.mesh.stage",
    "ici_fsdp_parallelism": "program.mesh.fsdp",
    "cp": "program.mesh.context",
    "lr": "run.learning_rate.peak",
    "learning_rate": "run.learning_rate.peak",
    "max_seq_len": "program.batch.seq_len",
    "per_device_train_batch_size": "program.batch.global_batch_size",
    "gradient_accumulation_steps": "program.batch.microbatches",
    "max_grad_norm": "program.optimizer.clip_norm",
    "lora_r": "program.adapter.rank",
    "max_steps": "run.steps",
    "save_steps": "run.checkpoints.local_every",
    "output_dir": "run.directory",
    "model_name_or_path": "run.init_from",
}


@pytest.mark.parametrize("table", ["program.optimizer.", "run.", ""])
def test_a_name_of_another_tool_is_answered_with_the_setting(refuse, table):
    here = {name for name in BROUGHT if (table, name) != ("run.", "learning_rate")}  # a table
    words = refuse(*(f"{table}{name}=1" for name in sorted(here)))
    for name in here:
        assert f"{name} is {BROUGHT[name]} in graphtrain" in words


EARLIER = {
    "program.batch.sequences": "program.batch.global_batch_size",
    "program.batch.length": "program.batch.seq_len",
    "program.batch.documents": "program.batch.cross_document_attention",
    "program.model.window": "program.model.sliding_window",
    "program.model.mixture": "program.model.moe",
    "program.adapter.base": "program.adapter.base_dtype",
    "program.pipeline.rounds": "program.pipeline.virtual_stages",
    "program.optimizer.moments": "program.optimizer.moment_dtype",
    "run.initial": "run.init_from",
    "run.schedule": "run.learning_rate",
    "run.data.longer": "run.data.overlong",
    "run.save_every": "run.checkpoints.local_every",
    "run.keep_checkpoints": "run.checkpoints.keep",
    "run.keep_best": "run.checkpoints.keep_best",
}


def test_a_name_of_an_earlier_version_is_answered_with_the_new_one(refuse):
    words = refuse(*(f"{old}=1" for old in EARLIER))
    for old, new in EARLIER.items():
        assert f"{old.rpartition('.')[2]} is {new} in graphtrain" in words


def test_a_number_in_place_of_the_learning_rate_table_is_answered_with_the_peak(refuse):
    assert "the peak learning rate is run.learning_rate.peak" in refuse("run.learning_rate=1e-3")


def test_a_name_with_another_unit_is_answered_with_the_conversion(refuse):
    words = refuse("run.num_train_epochs=3", "program.batch.per_device_train_batch_size=4")
    assert (
        "num_train_epochs is run.steps in graphtrain: run.steps = num_train_epochs x tokens of "
        "the data / (global_batch_size x seq_len)"
    ) in words
    assert (
        "in graphtrain: global_batch_size = per_device_train_batch_size x microbatches x devices"
    ) in words


def test_names_of_layers_say_that_those_of_dense_mlps_are_counted_apart(refuse):
    words = refuse("program.model.num_hidden_layers=61", "program.model.first_num_dense_layers=3")
    assert "layers = num_hidden_layers - dense_layers" in words
    assert "layers = all layers - first_num_dense_layers" in words


def test_names_of_deepseeks_settings_say_how_they_differ(refuse):
    table = "program.model"
    words = refuse(
        f"{table}.qk_nope_head_dim=128", f"{table}.mtp_num_layers=1", f"{table}.n_shared_experts=2"
    )
    assert "qk_nope_head_dim is program.model.head_dim in graphtrain: head_dim = qk_n" in words
    assert "mtp_num_layers is program.model.mtp_loss_weight in graphtrain: for mtp_n" in words
    assert "shared_expert_mlp = n_shared_experts x mlp" in words


def test_every_conversion_is_of_a_known_name():
    assert set(_CONVERSIONS) <= set(_SETTING_OF)


def test_the_name_of_an_optimizer_or_model_is_not_mistaken_for_names_of_tasks(refuse):
    words = refuse("program.optimizer.name=sgd", "model.name=llama", "run.data.name=1")
    assert "name is program.optimizer.kind in graphtrain" in words
    assert "name is program.model.preset in graphtrain" in words
    assert "run.tasks.names" not in words
