"""A module with its structure and its buffers, but without its weights.

Random and empty tensors are made on PyTorch's device "meta", which holds nothing; what is computed
from known numbers, such as rotary frequencies, is real. What the constructor does to parameters in
place is written down, so that the init graph can do it again to arrays that exist.
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

_UNKNOWN = (torch.empty, torch.randn, torch.rand, torch.normal, torch.empty_strided)
# After these nothing of what was there is left; those of torch.nn.init among them.
_OVERWRITING = (
    *("normal_", "uniform_", "zero_", "fill_", "copy_", "exponential_", "log_normal_"),
    *("constant_", "kaiming_uniform_", "kaiming_normal_", "xavier_uniform_", "xavier_normal_"),
)


@dataclass(frozen=True)
class Change:
    """One in-place operation on a parameter, and what it was given."""

    method: str  # of tensors, or a function of torch.nn.init
    arguments: tuple[Any, ...] = ()
    settings: tuple[tuple[str, Any], ...] = ()
    of_init: bool = False  # which of the two

    def apply(self, tensor: torch.Tensor) -> None:
        """Do it again, to another tensor."""
        settings = dict(self.settings)
        if self.of_init:
            getattr(torch.nn.init, self.method)(tensor, *self.arguments, **settings)
        else:
            getattr(tensor, self.method)(*self.arguments, **settings)


@dataclass
class Made:
    """A module on "meta", and how each of its parameters begins."""

    module: torch.nn.Module
    beginnings: dict[str, tuple[Change, ...]]  # by name; empty where it is not known
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)  # real

    def parameters(self) -> dict[str, torch.Tensor]:
        """By name; weights that are tied count once, under their first name."""
        return dict(self.module.named_parameters())


def make(factory: Callable[[], torch.nn.Module]) -> Made:
    """The module of a factory, with nothing allocated but its buffers.

    Raises:
        ImportedModelError: the factory makes no module, or a buffer of random numbers.
    """
    recorder = _Recorder()
    with recorder:
        module = factory()
    if not isinstance(module, torch.nn.Module):
        raise ImportedModelError(
            f"the factory returned {type(module).__name__}, no torch.nn.Module"
        )
    beginnings = {
        name: recorder.beginning(parameter) for name, parameter in module.named_parameters()
    }
    buffers = dict(module.named_buffers())
    for name, buffer in buffers.items():
        if buffer.is_meta:
            raise ImportedModelError(
                f"buffer {name} has no value: it is made by torch.empty or at random; compute it "
                "from known numbers, or make it a parameter"
            )
    return Made(module, beginnings, buffers)


class _Recorder(TorchFunctionMode):
    """Sends unknown numbers to "meta" and writes down what becomes of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self._changes: dict[int, list[Change]] = {}
        self._seen: list[torch.Tensor] = []  # kept, so that no other takes its id

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if func in _UNKNOWN and _on_host(kwargs.get("device")):
            kwargs["device"] = "meta"
        first = args[0] if args else kwargs.get("tensor")  # torch.nn.init names it
        if isinstance(first, torch.nn.Parameter) and name[-1:] == "_" and name[-2:] != "__":
            of_init = getattr(func, "__module__", "") == "torch.nn.init"
            self._write_down(first, name, args[1:], kwargs, of_init)
        return func(*args, **kwargs)

    def _write_down(
        self, parameter: Any, name: str, args: tuple, kwargs: dict, of_init: bool
    ) -> None:
        if name in ("requires_grad_", "detach_"):
            return
        if id(parameter) not in self._changes:
            self._seen.append(parameter)
            self._changes[id(parameter)] = []
        if name in _OVERWRITING:
            self._changes[id(parameter)].clear()
        kwargs = {key: value for key, value in kwargs.items() if key not in ("generator", "tensor")}
        given = tuple(_plain(one) for one in args)
        settings = tuple((key, _plain(value)) for key, value in sorted(kwargs.items()))
        self._changes[id(parameter)].append(Change(name, given, settings, of_init))

    def beginning(self, parameter: torch.Tensor) -> tuple[Change, ...]:
        """How a parameter begins; a real one as it is."""
        changes = self._changes.get(id(parameter), [])
        if not parameter.is_meta:
            values = parameter.detach().float()
            if values.numel() and bool((values == values.reshape(-1)[0]).all()):
                return (Change("fill_", (float(values.reshape(-1)[0]),)),)
            return (Change("copy_", (values.numpy().copy(),)),)
        return tuple(changes) if changes and changes[0].method in _OVERWRITING else ()


def _on_host(device: Any) -> bool:
    return device is None or torch.device(device).type == "cpu"


def _plain(value: Any) -> Any:
    """Numbers instead of tensors, which may not outlive the module."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else np.array(value.detach().float())
    return value


def parameter_count(made: Made) -> int:
    """Numbers in all parameters; nothing need be allocated."""
    return sum(math.prod(parameter.shape) for parameter in made.parameters().values())
