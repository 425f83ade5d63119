import jax
import jax.numpy as jnp
import pytest

from graphtrain.config.schema import Model, Optimizer
from graphtrain.graphs.optimizer import _is_matrix, make_optimizer, pack, unpack
from graphtrain.models.decoder import parameter_specs
from lowering.trees import flatten
from sharding_rules.arrays import ArraySpec

GPT2 = Model(
    layers=2, embed=8, heads=2, mlp=16, vocab=32, positions="learned", max_position_embeddings=8,
    norm="layer", activation="gelu_tanh", bias="all",
)  # fmt: skip


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
