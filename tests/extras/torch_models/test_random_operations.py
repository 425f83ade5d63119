"""Numbers that a module draws in its forward pass have PyTorch's distribution."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from graphtrain.config.schema import TorchModel
from graphtrain.torch_frontend.module_factory import factory
from graphtrain.torch_frontend.open_module import open_model

MODULES = Path(__file__).with_name("modules.py")
TOKENS = jnp.zeros((8, 128), jnp.int32)
OPERATIONS = (
    "exponential", "cauchy", "random", "random by name", "normal", "normal of a size",
    "normal of a deviation", "gumbel_softmax", "noise of 16 bits", "normal of 16 bits",
    "logarithm of 16 bits", "multinomial", "multinomial without replacement",
)  # fmt: skip


@pytest.mark.parametrize("operation", OPERATIONS)
def test_drawn_numbers_have_the_distribution_of_pytorch(operation):
    model = TorchModel(
        torch=f"{MODULES}:Drawing",
        vocab=16,
        dtype="float32",
        remat="none",
        overrides={"operation": operation},
    )
    opened, module = open_model(model), factory(model)()
    arrays = {"table": {"weight": np.zeros((16, 16), np.float32)}}
    first, again, other = (
        np.asarray(opened.forward(arrays, TOKENS, jax.random.key(seed))[0]) for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    torch.manual_seed(0)
    with torch.no_grad():
        expected = module(torch.tensor(np.asarray(TOKENS), dtype=torch.long)).numpy()
    shares = 0.05, 0.25, 0.5, 0.75, 0.95
    quantiles = [np.quantile(one, shares) for one in (first, expected)]
    np.testing.assert_allclose(*quantiles, atol=0.15)
    ends = [np.quantile(one, (0.001, 0.999)) for one in (first, expected)]
    np.testing.assert_allclose(*ends, atol=1.0)
