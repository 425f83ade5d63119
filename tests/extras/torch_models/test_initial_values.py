"""Initial values that a constructor computes, repeated with new random numbers."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from scipy import stats

from graphtrain.config.schema import TorchModel
from graphtrain.errors import ImportedModelError
from graphtrain.torch_frontend.meta_module import _truncated_normal
from graphtrain.torch_frontend.open_module import open_model, open_uncached
from lowering.trees import flatten

MODULES = Path(__file__).with_name("modules.py")


def test_a_value_computed_from_random_numbers_is_drawn_anew():
    model = TorchModel(torch=f"{MODULES}:TimeSteps", vocab=16, dtype="float32", remat="none")
    opened = open_model(model)
    first, second = (opened.initialize(jax.random.key(seed)) for seed in (0, 1))
    steps = jax.nn.softplus(first["bias"])
    assert float(steps.min()) >= 0.06 - 1e-6
    assert float(steps.max()) <= np.exp(-1.0) + 1e-6
    assert len(np.unique(steps)) > steps.size / 2
    assert not jnp.array_equal(first["bias"], second["bias"])


def test_numbers_drawn_into_zeros_follow_the_seed():
    model = TorchModel(torch=f"{MODULES}:DrawnIntoZeros", vocab=16, dtype="float32", remat="none")
    opened, again = (open_uncached(model) for _ in range(2))
    first, same = (one.initialize(jax.random.key(0))["router"] for one in (opened, again))
    np.testing.assert_array_equal(first, same)
    assert 2.5 < float(first.std()) < 3.5
    assert not jnp.array_equal(first, opened.initialize(jax.random.key(1))["router"])


def test_changes_of_the_data_and_by_operators_are_repeated():
    model = TorchModel(torch=f"{MODULES}:TimeSteps", vocab=16, dtype="float32", remat="none")
    initial = open_model(model).initialize(jax.random.key(0))
    np.testing.assert_array_equal(initial["head"]["bias"], 0.5)
    assert 2.5 < float(initial["head"]["weight"].std()) < 3.5


def test_values_computed_from_those_of_a_parameter_are_drawn_once():
    model = TorchModel(torch=f"{MODULES}:Decay", vocab=16, dtype="float32", remat="none")
    initial = open_model(model).initialize(jax.random.key(0))
    rates = np.exp(np.asarray(initial["rate"]))
    assert rates.min() >= 1.0 - 1e-5 and rates.max() <= 16.0 + 1e-4
    assert len(np.unique(rates)) > 60
    np.testing.assert_array_equal(initial["nothing"], 0.0)


def test_random_numbers_copied_into_zeros_are_drawn_anew():
    model = TorchModel(torch=f"{MODULES}:RandomLike", vocab=16, dtype="float32", remat="none")
    opened = open_model(model)
    first, second = (opened.initialize(jax.random.key(seed)) for seed in (0, 1))
    assert 1.0 <= float(first["steps"].min()) < 1.2 and 2.8 < float(first["steps"].max()) <= 3.0
    assert 2.0 < float(first["shift"].std()) < 4.0
    for name in ("steps", "shift"):
        assert not jnp.array_equal(first[name], second[name])


@pytest.mark.parametrize("path", ["head/weight", "zeros", "copied"])
def test_truncated_normal_numbers_follow_the_seed(path):
    model = TorchModel(torch=f"{MODULES}:Truncated", vocab=16, dtype="float32", remat="none")
    opened, again = open_model(model), open_uncached(model)
    first, same, other = (
        np.asarray(flatten(one.initialize(jax.random.key(seed)))[path])
        for one, seed in ((opened, 0), (again, 0), (opened, 1))
    )
    np.testing.assert_array_equal(first, same)
    assert not np.array_equal(first, other)
    truncated = stats.truncnorm(-1.0, 2.0, loc=1.0, scale=0.5)
    assert stats.kstest(first.ravel(), truncated.cdf).pvalue > 1e-3


def test_the_lowest_number_drawn_is_no_outlier_of_a_truncated_normal(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "uniform_", lambda self, low, high: self.fill_(low))
    lowest = _truncated_normal(torch.empty(1), 0.0, 0.02, -2.0, 2.0)
    assert -6 * 0.02 < float(lowest) < -5 * 0.02


def test_parameters_of_numbers_that_pytorch_drew_are_refused():
    model = TorchModel(
        torch=f"{MODULES}:Truncated",
        vocab=16,
        dtype="float32",
        remat="none",
        overrides={"drawn_before": True},
    )
    with pytest.raises(ImportedModelError, match="the initial values of zeros are unknown"):
        open_model(model).initialize(jax.random.key(0))
