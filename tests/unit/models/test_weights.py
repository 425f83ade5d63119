import jax
from flax import nnx

from graphtrain.models.init import ParameterKeys


def test_keys_are_those_of_flax():
    keys, flax = ParameterKeys(jax.random.key(3)), nnx.Rngs(jax.random.key(3))
    for _ in range(40):
        assert keys() == flax.params()
