"""Published models: their settings have as many parameters as their publishers say."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from graphtrain.config import load_config, presets
from graphtrain.config.presets import preset_settings
from graphtrain.config.render import render
from graphtrain.config.schema import Model
from graphtrain.errors import ConfigError
from graphtrain.models.flops import parameter_count
from graphtrain.weights.families import family_of_model, functional_settings

PUBLISHED = tomllib.loads(Path(presets.__file__).with_suffix(".toml").read_text())
TEXT = """\
[program.model]
preset = "llama2-7b"
layers = 2

[program.batch]
global_batch_size = 4
seq_len = 128

[run]
directory = "runs/small"
steps = 10
data = { train = "data/train" }
"""


def model(name: str) -> Model:
    settings = preset_settings(name)
    for table in ("moe", "rope_scaling", "latent_attention"):
        if table in settings:
            kind = Model.__dataclass_fields__[table].type.__args__[0]
            settings[table] = kind(**settings[table])
    return Model(**settings)


@pytest.mark.parametrize("name", PUBLISHED)
def test_settings_have_the_published_number_of_parameters(name):
    count, published = parameter_count(model(name)), PUBLISHED[name]["parameters"]
    if isinstance(published, int):
        assert count == published
    else:
        assert count / 1e9 == pytest.approx(published, rel=0.005)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_family_of_hugging_face_can_say_every_preset(name):
    family = family_of_model(model(name))
    written = family.config_from_model(model(name))
    assert functional_settings(family.model_from_config(written)) == functional_settings(
        model(name)
    )


def test_a_preset_stands_for_settings_that_the_file_may_change(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text(TEXT)
    loaded = load_config(path, ["program.model.vocab=32768"]).program.model
    assert (loaded.layers, loaded.embed, loaded.mlp, loaded.vocab) == (2, 4096, 11008, 32768)
    other = load_config(path, ["program.model.preset=gpt2"]).program.model
    assert (other.layers, other.positions) == (2, "learned")


def test_an_entry_of_a_mixture_is_changed_by_itself(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text(TEXT.replace("llama2-7b", "mixtral-8x7b"))
    preset = load_config(path).program.model
    changed = load_config(path, ["program.model.moe.balance_loss=0.5"]).program.model
    assert changed.moe == replace(preset.moe, balance_loss=0.5)


def test_a_saved_configuration_has_settings_and_no_preset(tmp_path):
    """So that it means the same model whatever a preset, or its merging, becomes."""
    path = tmp_path / "a.toml"
    path.write_text(TEXT.replace("llama2-7b", "deepseek-v3"))
    config = load_config(path)
    saved = render(config)
    assert "preset =" not in saved
    assert load_config(saved) == config
    lines = [line for line in saved.splitlines() if not line.startswith("q_lora_rank = ")]
    unset = load_config("\n".join(lines)).program.model.latent_attention
    assert unset == replace(config.program.model.latent_attention, q_lora_rank=None)


def test_a_preset_may_be_a_file(tmp_path):
    path, own = tmp_path / "a.toml", tmp_path / "model.toml"
    own.write_text(TEXT.partition("[program.batch]")[0].replace("layers = 2", "layers = 3"))
    path.write_text(TEXT.replace("llama2-7b", str(own)).replace("layers = 2", "embed = 64"))
    with pytest.raises(ConfigError, match=r"has no \[program\.model\]"):
        load_config(path, [f"program.model.preset={tmp_path}/none.toml"])
    text = "[program.model]\nlayers = 3\nembed = 32\nheads = 4\nmlp = 64\nvocab = 64\n"
    own.write_text(text)
    loaded = load_config(path).program.model
    assert (loaded.layers, loaded.embed) == (3, 64)


def test_a_misspelt_preset_is_met_with_the_nearest(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text(TEXT.replace("llama2-7b", "lama2-7b"))
    with pytest.raises(ConfigError, match="no such model; did you mean llama2-7b"):
        load_config(path)
