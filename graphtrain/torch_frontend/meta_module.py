"""Construction of a module without allocating its weights.

Random and empty tensors are created on PyTorch's device "meta", which allocates nothing. Values
computed from constants, such as rotary frequencies, are real. The in-place operations by which the
constructor initialises parameters are recorded, and the init graph repeats them on real arrays.
A parameter may be a copy of a value computed from random tensors; that computation is recorded too.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from graphtrain.errors import ImportedModelError
from graphtrain.torch_frontend import private_torch
from graphtrain.torch_frontend.random_values import RandomValue, RandomValues

_UNINITIALIZED = (
    *(torch.empty, torch.randn, torch.rand, torch.normal, torch.empty_strided),
    *(torch.rand_like, torch.randn_like),
)
# Methods of tensors and functions of torch.nn.init that overwrite all previous values.
_OVERWRITING = (
    *("normal_", "uniform_", "zero_", "fill_", "copy_", "exponential_", "log_normal_"),
    *("constant_", "orthogonal_", "kaiming_uniform_", "kaiming_normal_"),
    *("xavier_uniform_", "xavier_normal_"),
)
ORTHOGONAL = "orthogonal_"
_DRAWING = {*_OVERWRITING} - {"zero_", "fill_", "copy_", "constant_"}  # random numbers
# transformers replaces functions of torch.nn.init by its own while it builds a model.
_INIT_MODULES = ("torch.nn.init", "transformers.initialization")
_METHODS = ("normal_", "copy_", "zero_", "fill_")
_UNKNOWN = "unknown"  # argument whose value depends on weights
_VIEWS = ("view", "view_as")  # of all of a parameter
_DATA = torch.Tensor.data.__get__  # pyright: ignore[reportAttributeAccessIssue]
# In-place operators as the methods that they are.
_OPERATORS = {"__iadd__": "add_", "__isub__": "sub_", "__imul__": "mul_", "__itruediv__": "div_"}


@dataclass(frozen=True)
class InitOperation:
    """One in-place operation on a parameter, with its arguments."""

    method: str  # method of torch.Tensor, or function of torch.nn.init
    arguments: tuple[Any, ...] = ()
    settings: tuple[tuple[str, Any], ...] = ()
    is_torch_init: bool = False  # true if it is a function of torch.nn.init

    @property
    def is_random(self) -> bool:
        """True if the operation draws numbers, or takes a value that has no data."""
        without_data = any(
            isinstance(one, RandomValue) or one is _UNKNOWN for one in self.arguments
        )
        return self.method in _DRAWING or without_data

    @property
    def has_infinite_values(self) -> bool:
        """True if an argument is infinite or has infinite elements, as those of a mask."""
        numbers = (one for one in self.arguments if isinstance(one, float | np.ndarray))
        return any(bool(np.isinf(one).any()) for one in numbers)

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
    truncated_normals = private_torch.replacing_truncated_normal(_truncated_normal)
    with recorder, recorder.orthogonal_matrices(), truncated_normals:
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
        self._random = RandomValues()
        self._aliases: dict[int, torch.nn.Parameter] = {}  # by the id of a parameter's .data
        self._drawn: set[int] = set()  # storages with numbers that PyTorch drew
        self._seen: list[torch.Tensor] = []  # referenced, so that ids stay unique

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if func in _UNINITIALIZED and _on_host(kwargs.get("device")):
            kwargs["device"] = "meta"
        first = args[0] if args else kwargs.get("tensor")  # torch.nn.init passes it by name
        changed = self._aliases.get(id(first), first)
        name = _OPERATORS.get(name, name)
        if isinstance(changed, torch.nn.Parameter) and name[-1:] == "_" and name[-2:] != "__":
            module = getattr(func, "__module__", "")
            # The methods of tensors have other names for their arguments than torch.nn.init.
            is_torch_init = module in _INIT_MODULES and name not in _METHODS
            self._record(changed, name, args[1:], kwargs, is_torch_init)
        result: Any = first if _copies_no_data(changed, name, args) else func(*args, **kwargs)
        if (func == _DATA or name in _VIEWS) and isinstance(first, torch.nn.Parameter):
            self._aliases[id(result)] = first
            self._seen.append(result)
        elif isinstance(changed, torch.nn.Parameter) and changed is result and name in _OVERWRITING:
            others = {key: value for key, value in kwargs.items() if value is not changed}
            self._random.record_overwriting(changed, func, args[1:], others)
        else:
            self._note_drawn(name, result)
            self._random.record(func, args, kwargs, result)
            if isinstance(changed, torch.nn.Parameter) and changed is not first:
                self._random.forget(changed)  # its .data or a view may have been changed
        return result

    def _note_drawn(self, name: str, result: Any) -> None:
        """Note that PyTorch drew numbers into a tensor that is no parameter, or not yet one."""
        if name in _DRAWING and isinstance(result, torch.Tensor) and not result.is_meta:
            self._drawn.add(private_torch.storage_id(result))
            self._seen.append(result)

    @contextmanager
    def orthogonal_matrices(self) -> Iterator[None]:
        """Record orthogonal_, which PyTorch computes from a matrix that has no data here."""

        def orthogonal(tensor: torch.Tensor, gain: float = 1, **_: Any) -> torch.Tensor:
            self._record(tensor, ORTHOGONAL, (gain,), {}, True)
            return tensor

        with ExitStack() as stack:
            for module in filter(None, map(sys.modules.get, _INIT_MODULES)):
                stack.enter_context(mock.patch.object(module, ORTHOGONAL, orthogonal))
            yield

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
            if not parameter.is_meta:
                self._drawn.discard(private_torch.storage_id(parameter))
        kwargs = {key: value for key, value in kwargs.items() if key not in ("generator", "tensor")}
        arguments = tuple(self._to_plain_value(arg) for arg in args)
        settings = tuple(
            (key, self._to_plain_value(value)) for key, value in sorted(kwargs.items())
        )
        self._changes[id(parameter)].append(InitOperation(name, arguments, settings, is_torch_init))

    def _to_plain_value(self, value: Any) -> Any:
        """Convert tensors to Python scalars, NumPy arrays, or the computation of random ones."""
        if not isinstance(value, torch.Tensor):
            return value
        if value.is_meta:
            return self._random.value_of(value) or _UNKNOWN
        return value.item() if value.numel() == 1 else np.array(value.detach().float())

    def initializer(self, parameter: torch.Tensor) -> tuple[InitOperation, ...]:
        """Return the operations that initialise a parameter; empty if unknown."""
        changes = self._changes.get(id(parameter), [])
        # Numbers that were drawn into a tensor with data, as one of torch.zeros, are drawn anew.
        is_drawn = any(change.is_random for change in changes)
        if not parameter.is_meta and not is_drawn:
            if private_torch.storage_id(parameter) in self._drawn:
                return ()  # drawn before it was a parameter, by PyTorch's seed
            values = parameter.detach().float()
            if values.numel() and bool((values == values.reshape(-1)[0]).all()):
                return (InitOperation("fill_", (float(values.reshape(-1)[0]),)),)
            return (InitOperation("copy_", (values.numpy().copy(),)),)
        known = changes and changes[0].method in _OVERWRITING
        if not known or any(_UNKNOWN in map(_identity, change.arguments) for change in changes):
            return ()
        return tuple(changes)


def _truncated_normal(
    tensor: torch.Tensor, mean: float, std: float, low: float, high: float, **_: Any
) -> torch.Tensor:
    """Draw as trunc_normal_ does, by operations that can be repeated.

    PyTorch does nothing on the device "meta", and else draws until all numbers are inside. Of -1,
    which float32 reaches about once in 2**23 draws, erfinv would be infinite, and the number `low`.
    """
    scale = std * math.sqrt(2.0)
    lowest = max(math.erf((low - mean) / scale), 2.0**-23 - 1)
    with torch.no_grad():
        tensor.uniform_(lowest, math.erf((high - mean) / scale))
        return tensor.erfinv_().mul_(scale).add_(mean).clamp_(low, high)


def _copies_no_data(changed: Any, name: str, args: tuple[Any, ...]) -> bool:
    """Return whether random values, which have no data, are copied into a parameter that has."""
    if name != "copy_" or not isinstance(changed, torch.nn.Parameter) or len(args) < 2:
        return False
    into, values, *_ = args
    return not into.is_meta and values.is_meta


def _on_host(device: Any) -> bool:
    return device is None or torch.device(device).type == "cpu"


def _identity(value: Any) -> Any:
    """Return a value that can be compared: arrays are never the marker of unknown values."""
    return None if isinstance(value, np.ndarray) else value


def parameter_count(module: MetaModule) -> int:
    """Return the number of weights in all parameters."""
    return sum(math.prod(parameter.shape) for parameter in module.parameters().values())
