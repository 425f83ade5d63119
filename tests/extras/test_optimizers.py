"""Each kind of optimizer equals its reference for 50 steps: torch.optim, else the authors' formula.

The reference has every layer and every expert as a parameter of its own, as a matrix, in float64.
"""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from graphtrain.config.schema import Optimizer
from graphtrain.graphs.optimizer import make_optimizer
from lowering.trees import flatten, unflatten
from sharding_rules.arrays import ArraySpec

STEPS = 50
SPECS = {
    "embedding/tokens": ArraySpec((16, 8), ("vocab", "embed")),
    "layers/attention/query": ArraySpec((2, 8, 2, 3), ("layers", "embed", "heads", "head_dim")),
    "layers/attention/output": ArraySpec((2, 2, 3, 8), ("layers", "heads", "head_dim", "embed")),
    "layers/mlp/up": ArraySpec((2, 3, 8, 12), ("layers", "experts", "embed", "mlp")),
    "layers/mlp_norm/scale": ArraySpec((2, 8), ("layers", "embed")),
}
MATRICES = [path for path in SPECS if path.startswith("layers/") and "norm" not in path]
ROWS = {"layers/attention/query": 8, "layers/attention/output": 6, "layers/mlp/up": 8}
STACKED = {"embedding/tokens": 0, "layers/mlp/up": 2}  # leading dimensions; 1 if not named


def rate(step: int) -> float:
    return 1e-2 * min(1.0, (step + 1) / 5)


def numbers() -> tuple[dict[str, np.ndarray], list[dict[str, np.ndarray]]]:
    """Weights, and the gradients of each step, some of which are clipped."""
    random = np.random.default_rng(0)
    weights = {path: random.normal(size=spec.shape) for path, spec in SPECS.items()}
    gradients = [
        {path: random.normal(size=spec.shape) * scale for path, spec in SPECS.items()}
        for scale in (0.02 + 0.1 * (step % 3) for step in range(STEPS))
    ]
    return weights, gradients


def trained(optimizer: Optimizer) -> tuple[dict[str, np.ndarray], Any]:
    """Weights after all steps, and the state of the optimizer."""
    weights, gradients = numbers()
    made = make_optimizer(optimizer, unflatten(SPECS))

    @jax.jit
    def step(parameters, state, gradient, rate):
        updates, state = made.update(gradient, state, parameters, learning_rate=rate)
        return jax.tree.map(jnp.add, parameters, updates), state

    def single(arrays):
        return unflatten({path: jnp.float32(array) for path, array in arrays.items()})

    parameters = single(weights)
    state = made.init(parameters)
    for index, gradient in enumerate(gradients):
        parameters, state = step(parameters, state, single(gradient), jnp.float32(rate(index)))
    return {path: np.asarray(array) for path, array in flatten(parameters).items()}, state


def clipped(gradients: list[dict[str, np.ndarray]]) -> list[dict[str, np.ndarray]]:
    """Gradients with a global norm of at most 1."""
    norms = [math.sqrt(sum((g**2).sum() for g in one.values())) for one in gradients]
    assert min(norms) < 1 < max(norms)
    pairs = zip(gradients, norms, strict=True)
    return [{path: g / max(1, norm) for path, g in one.items()} for one, norm in pairs]


def parts(path: str, array: np.ndarray) -> list[np.ndarray]:
    """Views of the layers and experts of an array; matrices have two dimensions."""
    leading = array.shape[: STACKED.get(path, 1)]
    found = [array[index] for index in itertools.product(*map(range, leading))]
    return [part.reshape(ROWS[path], -1) if path in ROWS else part for part in found]


def of_torch(make, decay: float = 0.1) -> dict[str, np.ndarray]:
    """Weights after all steps of optimizers of torch; `make` gets a name, weights and a decay."""
    weights, gradients = numbers()
    tensors = {path: [torch.tensor(part) for part in parts(path, weights[path])] for path in SPECS}
    optimizers = [
        make(path, ones, 0.0 if "norm" in path else decay) for path, ones in tensors.items()
    ]
    for index, gradient in enumerate(clipped(gradients)):
        for (path, ones), optimizer in zip(tensors.items(), optimizers, strict=True):
            for tensor, part in zip(ones, parts(path, gradient[path]), strict=True):
                tensor.grad = torch.tensor(part)
            for group in optimizer.param_groups:
                group["lr"] = rate(index)
            optimizer.step()
    return {
        path: np.stack([one.numpy() for one in ones]).reshape(SPECS[path].shape)
        for path, ones in tensors.items()
    }


def assert_equal(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    start, _ = numbers()
    for path in SPECS:
        moved = np.abs(wanted[path] - start[path]).max()
        assert moved > 1e-3, path
        np.testing.assert_allclose(found[path], wanted[path], atol=3e-5, rtol=0, err_msg=path)


def test_adamw_is_that_of_torch():
    def make(path, tensors, decay):
        return torch.optim.AdamW(tensors, betas=(0.9, 0.95), weight_decay=decay)

    assert_equal(trained(Optimizer())[0], of_torch(make))


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_is_that_of_torch_with_decoupled_decay(nesterov):
    class Decoupled(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for tensor in group["params"]:
                    tensor.mul_(1 - group["lr"] * group["decoupled"])
            super().step(closure)

    def make(path, tensors, decay):
        groups = [{"params": tensors, "decoupled": decay}]
        return Decoupled(groups, momentum=0.8, nesterov=nesterov)

    assert_equal(trained(Optimizer(kind="sgd", momentum=0.8, nesterov=nesterov))[0], of_torch(make))


def test_adafactor_is_that_of_torch_of_each_layer_and_expert():
    def make(path, tensors, decay):
        return torch.optim.Adafactor(tensors, eps=(1e-30, 1e-3), weight_decay=decay)

    assert_equal(trained(Optimizer(kind="adafactor"))[0], of_torch(make))


def test_muon_is_that_of_torch_and_the_rest_is_adamw(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor)  # of its iteration

    def make(path, tensors, decay):
        if path in MATRICES:
            return torch.optim.Muon(tensors, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
        return torch.optim.AdamW(tensors, betas=(0.9, 0.95), weight_decay=decay)

    assert_equal(trained(Optimizer(kind="muon"))[0], of_torch(make))


def test_lion_is_the_formula_of_its_authors():
    """Chen et al. 2023, https://arxiv.org/abs/2302.06675, algorithm 2."""
    weights, gradients = numbers()
    momenta = {path: np.zeros(spec.shape) for path, spec in SPECS.items()}
    for index, gradient in enumerate(clipped(gradients)):
        for path, g in gradient.items():
            decay = 0.0 if "norm" in path else 0.1
            update = np.sign(0.9 * momenta[path] + 0.1 * g) + decay * weights[path]
            weights[path] = weights[path] - rate(index) * update
            momenta[path] = 0.95 * momenta[path] + 0.05 * g
    assert_equal(trained(Optimizer(kind="lion"))[0], weights)


def test_schedule_free_is_the_formula_of_its_authors():
    """AdamWScheduleFree of facebookresearch/schedule_free: y is trained, x is evaluated."""
    y, gradients = numbers()
    z, squares = dict(y), {path: np.zeros(spec.shape) for path, spec in SPECS.items()}
    weight_sum, largest = 0.0, 0.0
    for index, gradient in enumerate(clipped(gradients)):
        lr = rate(index)
        largest = max(largest, lr)
        weight_sum += largest**2
        share = largest**2 / weight_sum
        for path, g in gradient.items():
            squares[path] = 0.95 * squares[path] + 0.05 * g**2
            root = np.sqrt(squares[path] / (1 - 0.95 ** (index + 1))) + 1e-8
            direction = g / root + (0.0 if "norm" in path else 0.1) * y[path]
            y[path] = y[path] + share * (z[path] - y[path])
            y[path] = y[path] + lr * (0.9 * (1 - share) - 1) * direction
            z[path] = z[path] - lr * direction
    x = {path: (y[path] - 0.1 * z[path]) / 0.9 for path in SPECS}
    assert_equal(trained(Optimizer(kind="schedule_free"))[0], x)


def test_averaged_weights_are_those_of_torch_and_change_no_training():
    plain, _ = trained(Optimizer())
    found, state = trained(Optimizer(ema_decay=0.8))
    assert all((found[path] == plain[path]).all() for path in SPECS)
    average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.8)
    weights, gradients = numbers()
    tensors = {path: torch.tensor(array) for path, array in weights.items()}
    averages = [tensor.clone() for tensor in tensors.values()]
    decays = [
        {"params": [tensor], "weight_decay": 0.0 if "norm" in path else 0.1}
        for path, tensor in tensors.items()
    ]
    optimizer = torch.optim.AdamW(decays, betas=(0.9, 0.95))
    for index, gradient in enumerate(clipped(gradients)):
        for path, tensor in tensors.items():
            tensor.grad = torch.tensor(gradient[path])
        for group in optimizer.param_groups:
            group["lr"] = rate(index)
        optimizer.step()
        average(averages, list(tensors.values()), index)
    wanted = dict(zip(tensors, (one.numpy() for one in averages), strict=True))
    assert_equal({path: np.asarray(one) for path, one in flatten(state["ema"]).items()}, wanted)
