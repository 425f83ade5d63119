import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from graphtrain.config.schema import Model
from graphtrain.models.block import apply_layers, dropout, stack_layers
from graphtrain.models.init import ParameterKeys

MODEL = Model(
    layers=3,
    embed=16,
    heads=4,
    kv_heads=2,
    mlp=32,
    vocab=32,
    dropout=0.1,
    init_std=0.3,
    dtype="float32",
)


def test_the_scan_equals_a_loop_over_the_same_weights():
    random = np.random.default_rng(0)
    block, shapes = nnx.split(
        nnx.eval_shape(lambda: stack_layers(MODEL, ParameterKeys(jax.random.key(0))))
    )
    parameters = jax.tree.map(lambda x: random.normal(0, 0.3, x.shape).astype("float32"), shapes)
    x, key = random.normal(size=(2, 8, 16)).astype("float32"), jax.random.key(0)

    scan = jax.jit(lambda parameters: apply_layers(MODEL, nnx.merge(block, parameters), x, key)[0])
    one = jax.jit(lambda parameters, x, key: nnx.merge(block, parameters)(x, key)[0])
    want = x
    for index, layer_key in enumerate(jax.random.split(key, MODEL.layers)):
        want = one(jax.tree.map(lambda array, i=index: array[i], parameters), want, layer_key)
    np.testing.assert_allclose(scan(parameters), want, rtol=1e-5, atol=1e-5)
    assert not np.allclose(want, x, atol=0.1)


def test_dropout_zeroes_its_rate_and_keeps_the_mean():
    x = jnp.ones((500, 400))
    dropped = dropout(x, 0.25, jax.random.key(0))
    assert abs(np.mean(np.asarray(dropped) == 0) - 0.25) < 5e-3  # deviation of the share: 1e-3
    assert abs(dropped.mean() - 1) < 5e-3
    assert set(np.unique(dropped)) == {0, np.float32(1 / 0.75)}


@pytest.mark.parametrize(("rate", "seed"), [(0.0, 0), (0.5, None)])
def test_dropout_is_off_without_a_rate_or_a_key(rate, seed):
    x = jnp.ones((4, 4))
    assert dropout(x, rate, None if seed is None else jax.random.key(seed)) is x
