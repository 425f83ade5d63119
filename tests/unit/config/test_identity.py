from dataclasses import replace

import pytest

from graphtrain.config import load_config
from graphtrain.config.identity import (
    ADDED,
    EXECUTION,
    MATHEMATICS,
    classes_of,
    differences,
    identity_changes,
    mathematics,
    model_mathematics,
)
from graphtrain.config.settings import holds_settings, known_settings

CONFIG = """
[program.model]
layers = 2
embed = 32
heads = 4
mlp = 64
vocab = 264

[program.batch]
global_batch_size = 8
seq_len = 32

[run]
directory = "run"
steps = 10

[run.data]
train = "data/train"
"""


@pytest.fixture
def load(tmp_path):
    (tmp_path / "config.toml").write_text(CONFIG)
    return lambda *overrides: load_config(tmp_path / "config.toml", overrides)


def test_every_setting_is_either_mathematics_or_execution():
    settings = [path for path, node in known_settings().items() if not holds_settings(node)]
    classes = {".".join(path): classes_of(path) for path in settings}
    assert len(classes) > 80
    assert {name: kinds for name, kinds in classes.items() if len(kinds) != 1} == {}


def test_every_classified_name_is_a_setting_or_a_table():
    names = {".".join(path) for path in known_settings()}
    assert names >= MATHEMATICS | EXECUTION
    assert not MATHEMATICS & EXECUTION


@pytest.mark.parametrize(
    ("override", "name", "saved", "value"),
    [
        ("program.model.rope_theta=5e5", "program.model.rope_theta", 1e4, 5e5),
        ("program.model.sliding_window=16", "program.model.sliding_window", None, 16),
        ("program.optimizer.clip_norm=0.5", "program.optimizer.clip_norm", 1.0, 0.5),
        ("run.learning_rate.peak=1e-2", "run.learning_rate.peak", 3e-4, 1e-2),
        ("program.model.moe.experts=4", "program.model.moe.experts", None, 4),
        ("run.seed=7", "run.seed", 0, 7),
    ],
)
def test_a_change_of_the_mathematics_is_named_with_both_values(load, override, name, saved, value):
    changed = differences(mathematics(load()), mathematics(load(override)))
    assert changed[name] == (saved, value)
    assert all(other.startswith(name.rpartition(".")[0]) for other in changed)


def test_a_checkpoint_without_settings_that_came_later_is_of_the_same_run(load):
    now = mathematics(load("program.model.moe.experts=4", "program.model.moe.experts_per_token=2"))
    older = {name: value for name, value in now.items() if name not in ADDED}
    assert len(now) - len(older) == len(ADDED)
    assert identity_changes(older, now) == {}
    changed = identity_changes(older, now | {"program.model.moe.score_function": "sigmoid"})
    assert changed == {"program.model.moe.score_function": ("softmax", "sigmoid")}


@pytest.mark.parametrize(
    "override",
    [
        "program.target=cpu:8",
        "program.model.remat=full",
        "program.batch.microbatches=2",
        "run.steps=99",
    ],
)
def test_a_change_of_the_execution_is_free(load, override):
    assert mathematics(load()) == mathematics(load(override))


def test_an_imported_model_is_its_file_not_its_path(load, tmp_path):
    config = load()
    path = tmp_path / "model.py"
    values = []
    for folder in ("a", "b"):
        path = tmp_path / folder / "model.py"
        path.parent.mkdir()
        path.write_text("def make(): ...\n")
        values.append(imported(config, path))
    assert values[0] == values[1]
    path.write_text("def make(): return None\n")
    changed = differences(values[0], imported(config, path))
    assert list(changed) == ["program.model.torch"]


def imported(config, path):
    from graphtrain.config.schema import TorchModel

    model = TorchModel(torch=f"{path}:make", vocab=8)
    program = replace(config.program, model=model)
    assert model_mathematics(program) == {}
    return mathematics(replace(config, program=program))


def test_dropout_and_precision_do_not_make_trained_weights_another_model(load):
    program = load("program.model.dropout=0.5", "program.model.dtype=float32").program
    assert model_mathematics(program) == model_mathematics(load().program)
    other = load("program.model.norm_epsilon=1e-6").program
    assert model_mathematics(other) != model_mathematics(load().program)
