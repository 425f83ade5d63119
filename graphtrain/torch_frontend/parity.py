"""Parity check: loss and gradients of an imported model against eager PyTorch.

It runs once per model, before its first compilation. A trace silently loses some of PyTorch's
semantics, such as writes through views, which would otherwise only show as a worse loss.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Set
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from graphtrain.cache import Cache
from graphtrain.cache.key import CacheKey
from graphtrain.cache.layout import StorePaths
from graphtrain.cache.writing import replace_file, write_errors
from graphtrain.errors import ImportedModelError
from graphtrain.models.batch_images import with_images
from graphtrain.models.loss import cross_entropy
from graphtrain.torch_frontend.bridge import to_numpy
from graphtrain.torch_frontend.image_text import ImageInputs
from graphtrain.torch_frontend.joint import autocast_on_cpu
from graphtrain.torch_frontend.model import OpenedModel
from graphtrain.torch_frontend.module_calls import extract_logits
from graphtrain.torch_frontend.module_factory import factory
from graphtrain.torch_frontend.open_module import open_uncached
from graphtrain.torch_frontend.parity_batch import comparison_batch
from graphtrain.torch_frontend.shrink import shrink_model
from graphtrain.torch_frontend.silent_failures import likely_causes, user_code_error
from graphtrain.torch_frontend.source import key_ingredients
from graphtrain.torch_frontend.transformers_model import use_transformers_implementations
from lowering.trees import unflatten
from sharding_rules.documents import read_json

if TYPE_CHECKING:
    from graphtrain.config.schema import TorchModel

LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-4  # relative tolerances in float32
AUTOCAST_LOSS_TOLERANCE, AUTOCAST_GRADIENT_TOLERANCE = (
    1e-3,
    3e-2,
)  # tolerances if the module uses torch.autocast
_TOKENS = (2, 16)  # (batch, seq)
_ZERO = 1e-5  # of the largest gradient in its module: a gradient that is zero but for rounding
_SHOWN = 3  # parameters listed in an error
UNOPTIMIZED: dict[str, Any] = {"xla_backend_optimization_level": 0}  # compiler options


@dataclass(frozen=True)
class Parity:
    """Differences between an imported model and eager PyTorch."""

    loss: float  # relative difference
    gradient: float  # worst parameter's difference, relative to its largest gradient element
    parameter: str  # name of the worst parameter
    compared: dict[str, Any]  # overrides that made the model small; empty: compared at full size
    strict: str = ""  # why the strict front end is used; empty: the module is traced by JAX


_PARITY = frozenset(field.name for field in fields(Parity))


def ensure_parity(model: TorchModel, store: Path) -> Parity:
    """Compare a model with eager PyTorch, unless the store has a record of its comparison.

    Raises:
        ImportedModelError: they differ, or the model cannot be compared.
    """
    return Parity(**run_check_once(model, store, "", lambda: asdict(check_parity(model)), _PARITY))


def run_check_once(
    model: TorchModel,
    store: Path,
    suffix: str,
    check: Callable[[], dict[str, Any]],
    names: Set[str],
) -> dict[str, Any]:
    """Return the stored result of a check of a model; run the check if there is none.

    Args:
        model: settings of the checked model, which key the record.
        store: directory of the cache.
        suffix: of the record's file name; distinguishes checks.
        check: returns the result.
        names: keys of the result. A record with other keys, or that cannot be read, is replaced.
    """
    key = _key(model)
    path = _record_path(key, store, suffix)
    with Cache(store).lock(key):  # compilations of the model's other graphs wait here
        if (stored_result := _read(path, names)) is not None:
            return stored_result
        result = check()
        text = (json.dumps(result) + "\n").encode()
        with write_errors(path, len(text)):
            replace_file(StorePaths(store), path, text)
    return result


def stored_parity(model: TorchModel, store: Path) -> Parity | None:
    """Return the stored comparison of a model, or None."""
    record = _read(_record_path(_key(model), store), _PARITY)
    return None if record is None else Parity(**record)


def _read(path: Path, names: Set[str]) -> dict[str, Any] | None:
    """Read a record; None if it is missing, unreadable, or has other keys than these."""
    try:
        record = read_json(path)
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and record.keys() == names else None


def _record_path(key: CacheKey, store: Path, suffix: str = "") -> Path:
    return store / "parity" / f"{key.digest}{suffix}.json"


def _key(model: TorchModel) -> CacheKey:
    return CacheKey.of(**key_ingredients(model))


def check_parity(model: TorchModel, tokens: tuple[int, int] = _TOKENS) -> Parity:
    """Compare loss and gradients with eager PyTorch, in float32 on one batch of random tokens.

    If a trace differs and front_end is "auto", the strict front end is compared too.

    Args:
        model: settings; a large model is shrunk first.
        tokens: (batch, seq).

    Raises:
        ImportedModelError: they differ; names the worst parameters and the likely causes.
    """
    small, overrides = shrink_model(model)
    small = replace(small, dtype="float32")
    batch, images = comparison_batch(small, tokens)
    eager = _eager(small, module_with_weights(small), batch, images)
    opened = open_uncached(small)
    differences = _compare(opened, eager)
    if differences.close:
        return Parity(*differences.worst, overrides, opened.strict)
    mismatch = _mismatch(differences, eager)
    if model.front_end != "auto" or opened.strict or images is not None:
        raise ImportedModelError(mismatch)
    try:
        strict_differences = _compare(open_uncached(replace(small, front_end="strict")), eager)
    except ImportedModelError as error:
        raise ImportedModelError(f"{mismatch}; the strict front end fails too: {error}") from error
    if not strict_differences.close:
        raise ImportedModelError(f"{mismatch}; the strict front end does not match either")
    return Parity(*strict_differences.worst, overrides, mismatch)


@dataclass(frozen=True)
class _Eager:
    """Loss and gradients of eager PyTorch."""

    module: torch.nn.Module
    batch: np.ndarray  # (batch, seq + 1)
    images: np.ndarray | None  # (batch, images, height, width, 3)
    loss: float
    gradients: dict[str, np.ndarray]
    rough: bool  # torch.autocast computes some of it in half precision


@dataclass(frozen=True)
class _Differences:
    """Differences of loss and gradients from eager PyTorch."""

    value: float  # the loss
    loss: float  # relative difference of the loss
    gradients: dict[str, float]  # relative difference by parameter
    rough: bool  # compare with the tolerances for half precision

    @property
    def worst(self) -> tuple[float, float, str]:
        """Difference of the loss, and the largest of a gradient with its parameter's name."""
        name = max(self.gradients, key=lambda name: self.gradients[name])
        return self.loss, self.gradients[name], name

    @property
    def close(self) -> bool:
        loss, gradient = (
            (AUTOCAST_LOSS_TOLERANCE, AUTOCAST_GRADIENT_TOLERANCE)
            if self.rough
            else (LOSS_TOLERANCE, GRADIENT_TOLERANCE)
        )
        return self.loss <= loss and self.worst[1] <= gradient


def _compare(opened: OpenedModel, eager: _Eager) -> _Differences:
    disable_dropout(opened.meta.module)
    with with_images(None if eager.images is None else jnp.asarray(eager.images)):
        value, gradients = _loss_and_gradients(opened, weights(eager.module), eager.batch)
    loss = abs(value - eager.loss) / max(abs(eager.loss), 1.0)
    return _Differences(value, loss, _gradient_differences(gradients, eager.gradients), eager.rough)


def module_with_weights(model: TorchModel) -> torch.nn.Module:
    """Build the module with real weights, plus noise so that none is exactly zero or one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = factory(model)()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
    disable_dropout(module)
    if model.hf is not None:
        use_transformers_implementations(module)
    return module.train()


def disable_dropout(module: torch.nn.Module) -> None:
    """Set all dropout rates of a module to 0, as PyTorch's random numbers are not JAX's."""
    for inner in module.modules():
        for name, value in vars(inner).items():
            if "drop" in name and isinstance(value, float):
                setattr(inner, name, 0.0)
        if isinstance(inner, torch.nn.modules.dropout._DropoutNd):
            inner.p = 0.0


def weights(module: torch.nn.Module) -> dict[str, np.ndarray]:
    """Return the values of all parameters by name."""
    return {name: to_numpy(parameter) for name, parameter in module.named_parameters()}


def _loss_and_gradients(
    opened: OpenedModel, weights: Mapping[str, np.ndarray], batch: np.ndarray
) -> tuple[float, dict[str, np.ndarray]]:
    """Compute the traced model's loss, and its gradients by parameter name."""

    def objective(arrays: dict[str, jax.Array]) -> jax.Array:
        tokens = jnp.asarray(batch[:, :-1])
        out, terms = opened.forward(unflatten(arrays), tokens, jax.random.key(0))
        loss_mask = jnp.ones(out.shape[:2])
        loss = cross_entropy(out, jnp.asarray(batch[:, 1:]), loss_mask)[0] / loss_mask.size
        return loss + sum(terms.losses.values())

    arrays = stack_weights(opened, weights)
    lowered = jax.jit(jax.value_and_grad(objective)).lower(arrays)
    loss, gradients = lowered.compile(UNOPTIMIZED)(arrays)
    return float(loss), unstack_weights(opened, gradients)


def stack_weights(opened: OpenedModel, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Convert weights by parameter name to the stacked arrays by path that the model uses."""
    return {
        path: np.stack([weights[name] for name in names])
        if opened.is_stacked(path)
        else weights[names[0]]
        for path, names in opened.parameter_names_by_path().items()
    }


def unstack_weights(opened: OpenedModel, arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Convert arrays by path to weights by parameter name; the inverse of stack_weights."""
    by_name: dict[str, np.ndarray] = {}
    for path, names in opened.parameter_names_by_path().items():
        rows = (
            np.asarray(arrays[path]) if opened.is_stacked(path) else np.asarray(arrays[path])[None]
        )
        by_name |= dict(zip(names, rows, strict=True))
    return by_name


def _eager(
    model: TorchModel, module: torch.nn.Module, batch: np.ndarray, images: np.ndarray | None
) -> _Eager:
    tokens = torch.tensor(batch, dtype=torch.long)
    arguments: dict[str, Any] = {} if model.hf is None else {"input_ids": tokens[:, :-1]}
    if images is not None and (inputs := ImageInputs.of(model, module)) is not None:
        arguments = inputs.eager_arguments(tokens[:, :-1], images)
    with torch.device("cpu"), autocast_on_cpu() as autocasts:
        try:
            loss = _eager_loss(module, tokens, arguments)
            loss.backward()
        except Exception as error:
            # For example an IndexError if a token id is past the end of the embedding.
            who = f"{type(module).__name__}, run by PyTorch on token ids up to {int(tokens.max())},"
            raise user_code_error(who, error) from error
    gradients = {
        name: to_numpy(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        for name, parameter in module.named_parameters()
    }
    return _Eager(module, batch, images, float(loss.detach()), gradients, bool(autocasts))


def _eager_loss(
    module: torch.nn.Module, tokens: torch.Tensor, arguments: Mapping[str, Any]
) -> torch.Tensor:
    """Return the loss of tokens; without arguments of transformers, of a module of the user."""
    returned = module(**arguments, use_cache=False) if arguments else module(tokens[:, :-1])
    out = extract_logits(returned).float()
    loss = torch.nn.functional.cross_entropy(
        out.reshape(-1, out.shape[-1]), tokens[:, 1:].reshape(-1)
    )
    if (balance := getattr(returned, "aux_loss", None)) is not None:
        loss = loss + getattr(module, "router_aux_loss_coef", 0.0) * balance
    return loss


def _gradient_differences(
    gradients: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]
) -> dict[str, float]:
    """Return, by parameter, the largest difference relative to its largest gradient element.

    A gradient that is zero up to rounding (that of a key bias, for example, which the softmax
    cancels) is compared relative to the others of its module, whose sums round alike; a small one
    relative to all parameters. NaN or infinity on either side counts as an infinite difference.
    """
    sizes = {name: float(np.abs(gradient).max()) for name, gradient in expected.items()}
    largest, in_module = max(sizes.values()), dict[str, float]()
    for name, size in sizes.items():
        module = name.rpartition(".")[0]
        in_module[module] = max(size, in_module.get(module, 0.0))
    differences = {}
    for name, gradient in expected.items():
        difference = float(np.abs(gradients[name] - gradient).max())
        scale, beside = max(sizes[name], 1e-3 * largest), in_module[name.rpartition(".")[0]]
        if sizes[name] <= _ZERO * beside:
            scale = max(scale, beside)
        differences[name] = difference / scale if math.isfinite(difference) else math.inf
    return differences


def _mismatch(differences: _Differences, eager: _Eager) -> str:
    """Describe the mismatch: losses, worst parameters and likely causes."""
    gradient_differences, module = differences.gradients, eager.module
    worst = sorted(gradient_differences, key=lambda name: -gradient_differences[name])[:_SHOWN]
    worst_text = ", ".join(f"{name} ({gradient_differences[name]:.1e})" for name in worst)
    causes = likely_causes(module, torch.tensor(eager.batch[:, :-1], dtype=torch.long))
    cause_text = f"likely cause: {'; or '.join(causes)}" if causes else "no known cause was found"
    return (
        f"the traced {type(module).__name__} does not match eager PyTorch: loss "
        f"{differences.value:.6f} instead of {eager.loss:.6f}; largest relative "
        f"differences of gradients: {worst_text} (of {len(gradient_differences)} parameters); "
        f"{cause_text}"
    )
