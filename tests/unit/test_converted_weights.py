"""Damage to a converted folder is found before its weights are used."""

from dataclasses import replace

import numpy as np
import pytest
from published_folders import write_published

from graphtrain.config.schema import Data, MixtureOfExperts, Model, Run
from graphtrain.errors import TrainingError, WeightsError
from graphtrain.weights.hf_export import ExportedFiles, export_hugging_face
from graphtrain.weights.hf_import import import_hugging_face
from graphtrain.weights.initial import open_initial_weights
from graphtrain.weights.open import open_weights
from graphtrain.weights.weight_folder import open_weight_files

MODEL = Model(layers=2, embed=16, heads=2, mlp=24, vocab=32)


def quiet(done, count):
    """Show nothing."""


@pytest.fixture
def converted(tmp_path):
    """A converted folder, from files as transformers writes them."""
    return convert(MODEL, tmp_path)


def convert(model, tmp_path):
    write_published(model, tmp_path / "source")
    import_hugging_face(tmp_path / "source", tmp_path / "ours", quiet)
    return tmp_path / "ours"


def test_the_bias_that_selects_experts_is_exported_in_float32(tmp_path):
    mixture = MixtureOfExperts(
        experts=4, score_function="sigmoid", bias_update_rate=0.001, shared_expert_gate=False
    )
    folder = convert(replace(MODEL, moe=mixture), tmp_path)
    export_hugging_face(folder, tmp_path / "back", quiet, files=ExportedFiles("bfloat16"))
    before, after = (open_weight_files(tmp_path / name) for name in ("source", "back"))
    assert {str(after.dtype(name)) for name in after.names} == {"bfloat16", "float32"}
    for name in after.names:
        is_bias = name.endswith("e_score_correction_bias")
        assert (str(after.dtype(name)) == "float32") == is_bias, name
        if is_bias:
            np.testing.assert_array_equal(after.read(name), before.read(name))


def flip(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["weights/model.safetensors", "model.toml", "weights.json"])
def test_a_flipped_bit_is_refused_by_name(converted, name, tmp_path):
    open_weights(converted)
    flip(converted / name, -3)
    for use in (open_weights, lambda path: export_hugging_face(path, tmp_path / "back", quiet)):
        with pytest.raises(WeightsError, match=f"ours is damaged: {name}"):
            use(converted)
    assert not (tmp_path / "back").exists()


def test_weights_without_digests_are_used_with_a_warning(converted):
    (converted / "weights.json").unlink()
    with pytest.warns(UserWarning, match="has no weights.json, so damage .* is not noticed"):
        open_weights(converted)


def test_weights_without_a_module_for_further_tokens_are_refused_where_one_is_trained(converted):
    run = Run(directory="run", steps=1, data=Data(train="data"), init_from=str(converted))
    assert open_initial_weights(MODEL, run)
    told = "ours has no module of multi-token prediction, .*mtp_loss_weight = 0.3 .*; remove"
    with pytest.raises(WeightsError, match=told):
        open_initial_weights(replace(MODEL, mtp_loss_weight=0.3), run)


PROJECT = """
[program]
model = {{ layers = 1, embed = 8, heads = 1, mlp = 8, vocab = 300 }}
batch = {{ global_batch_size = 1, seq_len = 8 }}

[run]
directory = "{directory}"
steps = 1
data = {{ train = "data" }}
"""


def test_a_run_that_is_not_trained_yet_is_said_to_be_so(tmp_path):
    (tmp_path / "config.toml").write_text(PROJECT.format(directory=tmp_path / "run"))
    with pytest.raises(
        TrainingError, match=r"not trained yet; to train it: graphtrain run \S+ --c"
    ):
        open_weights(tmp_path / "run")
    with pytest.raises(WeightsError, match="base is neither a converted folder"):
        open_weights(tmp_path / "base")
