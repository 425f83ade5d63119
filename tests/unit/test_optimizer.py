import dataclasses

import jax
import jax.numpy as jnp
import pytest

from graphtrain.config.schema import MixtureOfExperts, Model, Optimizer
from graphtrain.errors import ConfigError
from graphtrain.graphs.optimizer import _is_matrix, make_optimizer, pack, unpack
from graphtrain.models.decoder import parameter_specs
from graphtrain.models.matrices import (
    MatrixAxes,
    Move,
    group_matrices,
    is_hidden_matrix,
    matrix_axes,
)
from lowering.trees import flatten
from sharding_rules.arrays import ArraySpec
from sharding_rules.mesh import MeshShape
from sharding_rules.rules import Rules

GPT2 = Model(
    layers=2, embed=8, heads=2, mlp=16, vocab=32, positions="learned", max_position_embeddings=8,
    norm="layer", activation="gelu_tanh", bias="all",
)  # fmt: skip

MIXTURE = Model(
    layers=2, embed=8, heads=2, mlp=16, vocab=32, bias="qkv", moe=MixtureOfExperts(experts=4)
)


@pytest.mark.parametrize("model", [GPT2, Model(layers=2, embed=8, heads=2, mlp=16, vocab=32)])
def test_matrices_decay_and_norms_and_biases_do_not(model):
    for path, spec in flatten(parameter_specs(model)).items():
        name = path.rpartition("/")[2]
        assert _is_matrix(spec) == (name != "scale" and not name.endswith("bias")), path


@pytest.mark.parametrize("settings", [Optimizer(), Optimizer(weight_decay=0.0, clip_norm=0.0)])
def test_packed_state_unpacks_to_itself(settings):
    state = make_optimizer(settings, {"w": ArraySpec((3,), ("embed",))}).init({"w": jnp.ones(3)})
    again = unpack(pack(state), state)
    assert jax.tree.structure(again) == jax.tree.structure(state)
    assert list(flatten(pack(state))) == ["adam/count", "adam/mu/w", "adam/nu/w"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kind": "lion", "epsilon": 1e-6}, 'epsilon is not a setting of kind = "lion"; it is one'),
        ({"momentum": 0.9}, 'momentum is not a setting of kind = "adamw"; it is one of "sgd", "mu'),
        ({"kind": "adafactor", "moment_dtype": "bfloat16"}, "moment_dtype is not a setting of"),
        ({"kind": "schedule_free", "beta1": 0.0}, "averages weights with beta1; raise it"),
        ({"kind": "schedule_free", "ema_decay": 0.9}, "remove ema_decay"),
        ({"kind": "muon", "custom": "a.py:make"}, 'custom takes the place of kind = "muon"'),
    ],
)
def test_settings_that_a_kind_has_not_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        Optimizer(**settings)


def test_muon_without_a_named_matrix_is_refused():
    specs = {
        "embedding": ArraySpec((8, 4), ("vocab", "embed")),
        "x": ArraySpec((3, 3), (None,) * 2),
    }
    with pytest.raises(ConfigError, match="the model has no matrix whose axes have names"):
        make_optimizer(Optimizer(kind="muon"), specs)


def test_rows_and_columns_of_matrices_follow_from_the_names_of_axes():
    found = {path: matrix_axes(spec) for path, spec in flatten(parameter_specs(MIXTURE)).items()}
    attention = MatrixAxes(stack=(0,), rows=(1,), columns=(2, 3))
    assert found["layers/attention/query"] == found["layers/attention/value"] == attention
    assert found["layers/attention/output"] == MatrixAxes((0,), (1, 2), (3,))
    assert found["layers/mlp/down"] == MatrixAxes((0, 1), (2,), (3,))
    assert found["layers/attention/query_bias"] is None and found["final_norm/scale"] is None
    fused = flatten(
        parameter_specs(dataclasses.replace(GPT2, fused_gate_up=True, activation="swiglu"))
    )
    assert matrix_axes(fused["layers/mlp/gate_up"]) == MatrixAxes((0, 2), (1,), (3,))
    hidden = [
        path for path, spec in flatten(parameter_specs(MIXTURE)).items() if is_hidden_matrix(spec)
    ]
    assert not [path for path in hidden if not path.startswith("layers/") or "norm" in path]


def test_matrices_of_one_shape_are_moved_together_and_replicas_take_what_is_left():
    """8 devices for 4 matrices of two arrays; shards of columns are joined from the last axis."""
    specs = {name: ArraySpec((2, 8, 16), ("layers", "embed", "mlp")) for name in ("up", "gate")}
    rules = Rules({"embed": ("fsdp",), "mlp": ("tensor",)}, {})
    (group,) = group_matrices(specs, rules, MeshShape({"data": 2, "fsdp": 2, "tensor": 2}))
    assert list(group.axes) == ["up", "gate"] and group.shard_shape == (4, 8)
    assert group.moves == (Move("fsdp", 2, 1), Move("tensor", 2, 2)) and group.padded_count == 4
    (group,) = group_matrices(specs, rules, MeshShape({"data": 8, "tensor": 2}))
    assert group.moves == (Move("tensor", 2, 2), Move("data", 8, None))
    assert group.count == 4 and group.padded_count == 16
