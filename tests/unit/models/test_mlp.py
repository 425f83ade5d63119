from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from graphtrain.config.schema import Model
from graphtrain.models.decoder import forward, parameter_specs
from graphtrain.models.flops import parameter_count

MODEL = Model(
    layers=2, embed=16, heads=2, mlp=24, vocab=32, bias="all", norm="layer", dtype="float32"
)
TOKENS = np.random.default_rng(1).integers(0, 32, (2, 8), np.int32)


def loss(model, parameters):
    return jnp.square(forward(model, parameters, TOKENS)[0]).sum()


def merge(layers):
    """The same weights, gate and up stacked."""
    mlp = dict(layers["mlp"])
    for kind in ("", "_bias"):
        pair = mlp.pop(f"gate{kind}"), mlp.pop(f"up{kind}")
        mlp[f"gate_up{kind}"] = jnp.stack(pair, axis=-2)
    return {**layers, "mlp": mlp}


@pytest.mark.parametrize("activation", ["swiglu", "geglu"])
def test_a_merged_gate_changes_neither_scores_nor_gradients(activation):
    apart = replace(MODEL, activation=activation)
    together = replace(apart, fused_gate_up=True)
    random = np.random.default_rng(0)
    parameters = jax.tree.map(
        lambda spec: random.normal(0, 0.3, spec.shape).astype("float32"), parameter_specs(apart)
    )
    merged = {**parameters, "layers": merge(parameters["layers"])}
    step = jax.jit(jax.value_and_grad(loss, 1), static_argnums=0)
    want, gradients = step(apart, parameters)
    got, merged_gradients = step(together, merged)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    wanted = {**gradients, "layers": merge(gradients["layers"])}
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4),
        merged_gradients,
        wanted,
    )


def test_a_merged_gate_is_one_parameter_of_the_same_size():
    model = replace(MODEL, fused_gate_up=True)
    specs = parameter_specs(model)
    gate_up = specs["layers"]["mlp"]["gate_up"]
    assert (gate_up.shape, gate_up.axes) == ((2, 16, 2, 24), ("layers", "embed", None, "mlp"))
    assert specs["layers"]["mlp"]["gate_up_bias"].axes == ("layers", None, "mlp")
    sizes = [int(np.prod(spec.shape)) for spec in jax.tree.leaves(specs)]
    assert sum(sizes) == parameter_count(model) == parameter_count(MODEL)


def test_without_a_gate_there_is_nothing_to_merge():
    with pytest.raises(ValueError, match="fused_gate_up = false"):
        replace(MODEL, activation="gelu", fused_gate_up=True)
