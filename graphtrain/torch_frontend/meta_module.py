"""Construction of a module without allocating its weights.

Random and empty tensors are created on PyTorch's device "meta", which allocates nothing. Values
computed from constants, such as rotary frequencies, are real. The in-place operations by which the
constructor initialises parameters are recorded, and the init graph repeats them on real arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from graphtrain.errors import ImportedModelError

_UNINITIALIZED = (torch.empty, torch.randn, torch.rand, torch.normal, torch.empty_strided)
# Methods of tensors and functions of torch.nn.init that overwrite all previous values.
_OVERWRITING = (
    *("normal_", "uniform_", "zero_", "fill_", "copy_", "exponential_", "log_normal_"),
    *("constant_", "kaiming_uniform_", "kaiming_normal_", "xavier_uniform_", "xavier_normal_"),
)


@dataclass(frozen=True)
class InitOperation:
    """One in-place operation on a parameter, with its arguments."""

    method: str  # method of torch.Tensor, or function of torch.nn.init
    arguments: tuple[Any, ...] = ()
    settings: tuple[tuple[str, Any], ...] = ()
    is_torch_init: bool = False  # true if it is a function of torch.nn.init

    def apply(self, tensor: torch.Tensor) -> None:
        """Repeat the operation on another tensor."""
        settings = dict(self.settings)
        if self.is_torch_init:
            getattr(torch.nn.init, self.method)(tensor, *self.arguments, **settings)
        else:
            getattr(tensor, self.method)(*self.arguments, **settings)


@dataclass
class MetaModule:
    """A module on the device "meta", and how each of its parameters is initialised."""

    module: torch.nn.Module
    initializers: dict[str, tuple[InitOperation, ...]]  # initialisation by name; empty: unknown
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)  # with real values

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return parameters by name; a tied weight is listed once, under its first name."""
        return dict(self.module.named_parameters())


def build_on_meta(factory: Callable[[], torch.nn.Module]) -> MetaModule:
    """Build a module by its factory, and allocate nothing but its buffers.

    Raises:
        ImportedModelError: the factory returns no module, or a buffer is random.
    """
    recorder = _Recorder()
    with recorder:
        module = factory()
    if not isinstance(module, torch.nn.Module):
        raise ImportedModelError(
            f"the factory returned a {type(module).__name__}, not a torch.nn.Module"
        )
    initializers = {
        name: recorder.initializer(parameter) for name, parameter in module.named_parameters()
    }
    buffers = dict(module.named_buffers())
    for name, buffer in buffers.items():
        if buffer.is_meta:
            raise ImportedModelError(
                f"buffer {name} has no value: it is uninitialised (torch.empty) or random; compute "
                "it from constants, or make it a parameter"
            )
    return MetaModule(module, initializers, buffers)


class _Recorder(TorchFunctionMode):
    """Mode that moves uninitialised and random tensors to "meta" and records parameter changes."""

    def __init__(self) -> None:
        super().__init__()
        self._changes: dict[int, list[InitOperation]] = {}
        self._seen: list[torch.Tensor] = []  # referenced, so that ids stay unique

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if func in _UNINITIALIZED and _on_host(kwargs.get("device")):
            kwargs["device"] = "meta"
        first = args[0] if args else kwargs.get("tensor")  # torch.nn.init passes it by name
        if isinstance(first, torch.nn.Parameter) and name[-1:] == "_" and name[-2:] != "__":
            is_torch_init = getattr(func, "__module__", "") == "torch.nn.init"
            self._record(first, name, args[1:], kwargs, is_torch_init)
        return func(*args, **kwargs)

    def _record(
        self, parameter: Any, name: str, args: tuple, kwargs: dict, is_torch_init: bool
    ) -> None:
        if name in ("requires_grad_", "detach_"):
            return
        if id(parameter) not in self._changes:
            self._seen.append(parameter)
            self._changes[id(parameter)] = []
        if name in _OVERWRITING:
            self._changes[id(parameter)].clear()
        kwargs = {key: value for key, value in kwargs.items() if key not in ("generator", "tensor")}
        arguments = tuple(_to_plain_value(arg) for arg in args)
        settings = tuple((key, _to_plain_value(value)) for key, value in sorted(kwargs.items()))
        self._changes[id(parameter)].append(InitOperation(name, arguments, settings, is_torch_init))

    def initializer(self, parameter: torch.Tensor) -> tuple[InitOperation, ...]:
        """Return the operations that initialise a parameter; empty if unknown."""
        changes = self._changes.get(id(parameter), [])
        if not parameter.is_meta:
            values = parameter.detach().float()
            if values.numel() and bool((values == values.reshape(-1)[0]).all()):
                return (InitOperation("fill_", (float(values.reshape(-1)[0]),)),)
            return (InitOperation("copy_", (values.numpy().copy(),)),)
        return tuple(changes) if changes and changes[0].method in _OVERWRITING else ()


def _on_host(device: Any) -> bool:
    return device is None or torch.device(device).type == "cpu"


def _to_plain_value(value: Any) -> Any:
    """Convert tensors to Python scalars or NumPy arrays."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else np.array(value.detach().float())
    return value


def parameter_count(module: MetaModule) -> int:
    """Return the number of weights in all parameters."""
    return sum(math.prod(parameter.shape) for parameter in module.parameters().values())
