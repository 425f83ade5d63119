"""Five steps of AdamW, compared with eager PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch

from family_checks.states import (
    DECAY,
    OPTIMIZER,
    RATE,
    Mismatch,
    batch,
    largest_difference,
    module_parameters,
    new_state,
    train_step,
    values,
)
from graphtrain.config.schema import TorchModel
from graphtrain.torch_frontend.open_module import open_model
from graphtrain.torch_frontend.parity import module_with_weights, unstack_weights
from lowering.trees import flatten

STEPS = 5
LOSS_TOLERANCE, WEIGHT_TOLERANCE = 1e-5, 1e-4
Weights = dict[str, np.ndarray]


def check_training(model: TorchModel, folder: Path) -> str:
    """Compare losses and final weights; return their largest differences.

    Where float32 itself does not suffice for the tolerance, as float64 shows, both are compared
    with PyTorch in float64.
    """
    found, weights = _traced(model)
    expected, expected_weights = _eager(model, torch.float32)
    loss = _largest_relative(found, expected)
    name, difference = largest_difference(weights, expected_weights)
    if loss < LOSS_TOLERANCE and difference < WEIGHT_TOLERANCE:
        return f"loss {loss:.0e}, weights {difference:.0e}"
    exact, exact_weights = _eager(model, torch.float64)
    rounding = _largest_relative(expected, exact)
    _, weight_rounding = largest_difference(expected_weights, exact_weights)
    loss_error = _largest_relative(found, exact)
    _, weight_error = largest_difference(weights, exact_weights)
    loss_is_exact = loss_error < max(LOSS_TOLERANCE, rounding)
    if loss_is_exact and weight_error < max(WEIGHT_TOLERANCE, weight_rounding):
        return (
            f"from float64: loss {loss_error:.0e}, weights {weight_error:.0e}; PyTorch in float32: "
            f"{rounding:.0e}, {weight_rounding:.0e}"
        )
    if not loss < LOSS_TOLERANCE:
        step = next(
            i for i in range(STEPS) if not _relative(found[i], expected[i]) < LOSS_TOLERANCE
        )
        raise Mismatch(f"step {step + 1}: loss {found[step]:.6f} instead of {expected[step]:.6f}")
    raise Mismatch(f"after {STEPS} steps {name} differs by {difference:.1e}")


def _relative(found: float, expected: float) -> float:
    return abs(found - expected) / abs(expected)


def _largest_relative(found: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest relative difference; NaN if there is one."""
    return float(np.max([_relative(*pair) for pair in zip(found, expected, strict=True)]))


def _traced(model: TorchModel) -> tuple[list[float], Weights]:
    """Return the losses of the traced model, and its weights after the last step."""
    opened = open_model(model)
    step, losses = train_step(model), []
    state = new_state(module_parameters(opened, module_with_weights(model)))
    for seed in range(STEPS):
        out = step(state, batch(seed), jnp.float32(RATE))
        state = out["state"]
        losses.append(float(out["metrics"]["loss"]))
    return losses, unstack_weights(opened, flatten(jax.device_get(state["parameters"])))


def _eager(model: TorchModel, dtype: torch.dtype) -> tuple[list[float], Weights]:
    """Return the losses of PyTorch's own training, and its weights after the last step."""
    module = module_with_weights(model).to(dtype)
    optimizer = _reference_optimizer(module)
    losses = [_eager_step(module, optimizer, seed) for seed in range(STEPS)]
    return losses, values(module)


def _reference_optimizer(module: torch.nn.Module) -> torch.optim.Optimizer:
    """Return AdamW that decays matrices: weights of products and embeddings, by their modules."""
    decayed, others = [], []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            (decayed if _is_decayed(module, name, parameter) else others).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": DECAY},
        {"params": others, "weight_decay": 0.0},
    ]
    chosen = OPTIMIZER
    return torch.optim.AdamW(groups, RATE, (chosen.beta1, chosen.beta2), chosen.epsilon)


def _is_decayed(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> bool:
    owner, _, last = name.rpartition(".")
    matrices = torch.nn.Linear, torch.nn.Embedding, torch.nn.Conv1d
    inner = module.get_submodule(owner)
    if isinstance(inner, matrices) or type(inner).__name__ == "Conv1D":
        return last == "weight"
    is_matrix = sum(size > 1 for size in parameter.shape) > 1
    return is_matrix and not last.endswith("bias") and last != "A_log"  # as in Mamba


def _eager_step(module: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> float:
    arrays = batch(seed)
    tokens = torch.tensor(np.asarray(arrays["tokens"])[0], dtype=torch.long)
    targets = torch.tensor(np.asarray(arrays["targets"])[0], dtype=torch.long)
    logits = module(input_ids=tokens, use_cache=False).logits
    logits = logits.to(max(logits.dtype, torch.float32, key=lambda dtype: dtype.itemsize))
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()
