"""The loss and every gradient of an imported model, beside those of PyTorch itself.

Compared once for a model, before its first compilation: some of what PyTorch does is lost in a
trace without a word, as a write through a view, and would only show as a worse loss after days.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from filelock import FileLock

from graphtrain.key import CacheKey
from graphtrain.loss import cross_entropy
from graphtrain.torch_models.bridge import to_numpy
from graphtrain.torch_models.causes import likely_causes
from graphtrain.torch_models.errors import ImportedModelError
from graphtrain.torch_models.model import OpenedModel, factory, open_model, scores
from graphtrain.torch_models.shrink import shrunk
from graphtrain.torch_models.source import ingredients
from graphtrain.torch_models.transformers_model import use_own_parts
from lowering.trees import unflatten

if TYPE_CHECKING:
    from graphtrain.config.schema import Imported

LOSS, GRADIENT = 1e-5, 1e-4  # most that they may differ, relative; float32
_TOKENS = (2, 16)
_SHOWN = 3  # parameters that an error names
QUICKLY: dict[str, Any] = {"xla_backend_optimization_level": 0}


@dataclass(frozen=True)
class Parity:
    """How far a model and PyTorch's are apart."""

    loss: float  # relative
    gradient: float  # of the largest number in a parameter's gradient, the worst parameter
    parameter: str  # which that is
    compared: dict[str, Any]  # the overrides that made the model small; empty: as it is


def ensure_parity(model: Imported, store: Path) -> None:
    """Compare a model with PyTorch, unless the store holds that it has been.

    Raises:
        ImportedModelError: they differ, or the model cannot be compared.
    """
    once(model, store, "", lambda: asdict(check_parity(model)))


def once(model: Imported, store: Path, suffix: str, check: Callable[[], dict[str, Any]]) -> None:
    """Check a model, unless the store holds what was found."""
    digest = CacheKey.of(**ingredients(model)).digest
    path = store / "parity" / f"{digest}{suffix}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):  # the other graphs wait for the first
        if not path.is_file():
            found = check()
            unfinished = path.with_suffix(".unfinished")
            unfinished.write_text(json.dumps(found) + "\n")
            unfinished.rename(path)


def check_parity(model: Imported, tokens: tuple[int, int] = _TOKENS) -> Parity:
    """Compare loss and gradients, in float32 and on one batch of random tokens.

    Raises:
        ImportedModelError: they differ; with the worst parameters and the likely causes.
    """
    small, overrides = shrunk(model)
    small = replace(small, dtype="float32")
    opened, module = open_model(small), real_module(small)
    without_dropout(opened.made.module)
    assert small.vocab is not None
    batch = np.random.default_rng(0).integers(0, small.vocab, (tokens[0], tokens[1] + 1), np.int32)
    loss, gradients = _traced(opened, weights(module), batch)
    expected_loss, expected = _eager(module, batch, hf=small.hf is not None)
    apart = _apart(opened, gradients, expected)
    worst = max(apart, key=lambda name: apart[name])
    loss_apart = abs(loss - expected_loss) / max(abs(expected_loss), 1.0)
    if not (loss_apart <= LOSS and apart[worst] <= GRADIENT):
        raise ImportedModelError(_mismatch(loss, expected_loss, apart, module, batch))
    return Parity(loss_apart, apart[worst], worst, overrides)


def real_module(model: Imported) -> torch.nn.Module:
    """The module with weights, none of which is zero or one as constructors leave them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = factory(model)()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
    without_dropout(module)
    if model.hf is not None:
        use_own_parts(module)
    return module.train()


def without_dropout(module: torch.nn.Module) -> None:
    """Let a module drop nothing, in training neither; its random numbers are not JAX's."""
    for inner in module.modules():
        for name, value in vars(inner).items():
            if "drop" in name and isinstance(value, float):
                setattr(inner, name, 0.0)
        if isinstance(inner, torch.nn.modules.dropout._DropoutNd):
            inner.p = 0.0


def weights(module: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: to_numpy(parameter) for name, parameter in module.named_parameters()}


def _traced(
    opened: OpenedModel, weights: Mapping[str, np.ndarray], batch: np.ndarray
) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradients by name in the module."""

    def objective(arrays: dict[str, jax.Array]) -> jax.Array:
        given = jnp.asarray(batch[:, :-1])
        out, terms = opened.forward(unflatten(arrays), given, jax.random.key(0))
        ones = jnp.ones(out.shape[:2])
        loss = cross_entropy(out, jnp.asarray(batch[:, 1:]), ones)[0] / ones.size
        return loss + sum(terms.values())

    arrays = stacked(opened, weights)
    lowered = jax.jit(jax.value_and_grad(objective)).lower(arrays)
    loss, gradients = lowered.compile(QUICKLY)(arrays)
    return float(loss), unstacked(opened, gradients)


def stacked(opened: OpenedModel, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Arrays by the path they are kept under, of those by name in the module."""
    return {
        path: np.stack([weights[name] for name in names])
        if opened.is_stacked(path)
        else weights[names[0]]
        for path, names in opened.stored().items()
    }


def unstacked(opened: OpenedModel, arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The weights that stacked was given."""
    by_name: dict[str, np.ndarray] = {}
    for path, names in opened.stored().items():
        rows = (
            np.asarray(arrays[path]) if opened.is_stacked(path) else np.asarray(arrays[path])[None]
        )
        by_name |= dict(zip(names, rows, strict=True))
    return by_name


def _eager(
    module: torch.nn.Module, batch: np.ndarray, *, hf: bool
) -> tuple[float, dict[str, np.ndarray]]:
    tokens = torch.tensor(batch, dtype=torch.long)
    with torch.device("cpu"):
        given = tokens[:, :-1]
        returned = module(input_ids=given, use_cache=False) if hf else module(given)
        out = scores(returned).float()
        loss = torch.nn.functional.cross_entropy(
            out.reshape(-1, out.shape[-1]), tokens[:, 1:].reshape(-1)
        )
        if (balance := getattr(returned, "aux_loss", None)) is not None:
            loss = loss + getattr(module, "router_aux_loss_coef", 0.0) * balance
        loss.backward()
    gradients = {
        name: to_numpy(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        for name, parameter in module.named_parameters()
    }
    return float(loss.detach()), gradients


def _apart(
    opened: OpenedModel, gradients: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]
) -> dict[str, float]:
    """By parameter, the largest difference over the largest number.

    A gradient that is zero but for rounding, as of the bias of keys, counts beside the others.
    """
    largest = max(float(np.abs(gradient).max()) for gradient in expected.values())
    return {
        name: float(np.abs(gradients[name] - gradient).max())
        / max(float(np.abs(gradient).max()), 1e-3 * largest)
        for name, gradient in expected.items()
    }


def _mismatch(
    loss: float,
    expected: float,
    apart: Mapping[str, float],
    module: torch.nn.Module,
    batch: np.ndarray,
) -> str:
    worst = sorted(apart, key=lambda name: -apart[name])[:_SHOWN]
    listed = ", ".join(f"{name} by {apart[name]:.1e}" for name in worst)
    causes = likely_causes(module, torch.tensor(batch[:, :-1], dtype=torch.long))
    said = f"likely cause: {'; or '.join(causes)}" if causes else "no known cause was found"
    return (
        f"traced, {type(module).__name__} is not what PyTorch computes: loss {loss:.6f} instead of "
        f"{expected:.6f}; gradients differ most of {listed} (of {len(apart)}); {said}"
    )
