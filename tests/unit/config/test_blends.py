"""A blend in a configuration file: read, written back, and refused where it says too much."""

import tomllib

import pytest

from graphtrain.config.load import load_config
from graphtrain.config.render import render
from graphtrain.errors import ConfigError

START = """
[program.model]
layers = 1
embed = 8
heads = 2
mlp = 8
vocab = 8
[program.batch]
global_batch_size = 2
seq_len = 4
[run]
directory = "x"
steps = 1
[run.data]
"""


def load(tmp_path, text):
    (tmp_path / "c.toml").write_text(START + text)
    return load_config(tmp_path / "c.toml")


@pytest.mark.parametrize("share", ["weight", "epochs"])
def test_a_blend_loads_and_renders_back_to_itself(tmp_path, share):
    text = f'train = [{{ dataset = "a", {share} = 0.5 }}, {{ dataset = "b", {share} = 2.0 }}]\n'
    config = load(tmp_path, text)
    assert [getattr(part, share) for part in config.run.data.train] == [0.5, 2.0]
    assert tomllib.loads(render(config))["run"]["data"]["train"] == [
        {"dataset": "a", share: 0.5},
        {"dataset": "b", share: 2.0},
    ]
    (tmp_path / "again.toml").write_text(render(config))
    assert load_config(tmp_path / "again.toml") == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('train = [{ dataset = "a" }]', "set either weight or epochs for a"),
        (
            'train = [{ dataset = "a", weight = 1.0, epochs = 1.0 }]',
            "set either weight or epochs for a",
        ),
        (
            'train = [{ dataset = "a", weight = 1.0 }, { dataset = "b", epochs = 1.0 }]',
            "must all have a weight, or all have epochs",
        ),
        ("train = []", "run.data.train"),
        (
            'train = [{ dataset = "a", wieght = 1.0 }]',
            r"unknown setting run\.data\.train\.0\.wieght",
        ),
        ('train = [{ dataset = "a", weight = 0.0 }]', "run.data.train"),
    ],
)
def test_a_blend_that_cannot_be_used_says_why(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message) as refused:
        load(tmp_path, text)
    assert "BlendPart" not in str(refused.value)
