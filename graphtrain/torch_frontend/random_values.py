"""Values computed from random tensors while a module is built, as computations to repeat.

State space models, for example, initialise a bias by the inverse softplus of random time steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

_RANDOM = (torch.empty, torch.rand, torch.randn)
# Functions that read nothing of their first argument but its shape, and what they fill with.
_LIKE = {torch.ones_like: 1.0, torch.zeros_like: 0.0, torch.empty_like: 0.0}
_RANDOM_LIKE = {torch.rand_like: torch.rand, torch.randn_like: torch.randn}
_FILLING = ("uniform_", "normal_", "zero_", "fill_", "copy_")  # new values, whatever was there
_PLACEMENT = ("device", "generator", "requires_grad", "pin_memory", "memory_format", "layout")


@dataclass(frozen=True)
class RandomValue:
    """One operation on tensors, some of which are results of other operations."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    settings: tuple[tuple[str, Any], ...] = ()

    def compute(self, drawn: dict[int, torch.Tensor] | None = None) -> torch.Tensor:
        """Run the computation with new random numbers, on the current device.

        Args:
            drawn: results by the identity of their computation; one that occurs twice in another
                is the same random numbers.
        """
        drawn = {} if drawn is None else drawn
        if id(self) not in drawn:
            arguments = _computed(self.arguments, drawn)
            settings = _computed(dict(self.settings), drawn)
            drawn[id(self)] = _not_in_place(self.function)(*arguments, **settings)
        return drawn[id(self)]


class RandomValues:
    """The computations of tensors on the device "meta" that do not depend on weights."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[torch.Tensor, RandomValue]] = {}  # tensors keep ids unique

    def value_of(self, tensor: torch.Tensor) -> RandomValue | None:
        """Return the computation of a tensor; None if it is unknown."""
        known = self._values.get(id(tensor))
        return known and known[1]

    def record(self, function: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        """Record one call, if its result is a tensor without data."""
        if not isinstance(result, torch.Tensor) or not result.is_meta:
            return
        settings = {name: value for name, value in kwargs.items() if name not in _PLACEMENT}
        if function in _LIKE:
            value = RandomValue(torch.full, (tuple(result.shape), _LIKE[function]))
        elif function in _RANDOM_LIKE:
            value = RandomValue(_RANDOM_LIKE[function], (tuple(result.shape),))
        elif function in _RANDOM:
            value = RandomValue(function, tuple(args), tuple(sorted(settings.items())))
        else:
            leaves, _ = pytree.tree_flatten((args, settings))
            if not all(self._is_known(leaf) for leaf in leaves):
                self._values.pop(id(result), None)  # an in-place change by something unknown
                return
            value = RandomValue(function, self._plain(tuple(args)), self._pairs(settings))
        self._values[id(result)] = result, value

    def forget(self, tensor: torch.Tensor) -> None:
        """Make a tensor unknown."""
        self._values.pop(id(tensor), None)

    def record_overwriting(
        self, parameter: torch.nn.Parameter, function: Any, args: Any, kwargs: Mapping[str, Any]
    ) -> None:
        """Record a call that overwrites all values of a parameter, which others may depend on."""
        if parameter.is_meta:
            empty = torch.empty(parameter.shape, device="meta")
            self._values[id(empty)] = empty, RandomValue(torch.empty, (tuple(parameter.shape),))
            self.record(function, (empty, *args), kwargs, parameter)

    def _is_known(self, leaf: Any) -> bool:
        is_data = not isinstance(leaf, torch.Tensor) or not leaf.is_meta
        return is_data or self.value_of(leaf) is not None

    def _plain(self, tree: Any) -> Any:
        def convert(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            return self.value_of(leaf) if leaf.is_meta else np.array(leaf.detach().float())

        return pytree.tree_map(convert, tree)

    def _pairs(self, settings: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
        return tuple((name, self._plain(value)) for name, value in sorted(settings.items()))


def _not_in_place(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method that returns a new tensor; torchax lacks some that overwrite their own."""
    name = getattr(function, "__name__", "")
    if name == "normal_":
        return torch.Tensor.normal_  # torchax has the method, not the function of torch.nn.init
    if name[-1:] != "_" or name in _FILLING:
        return function
    return getattr(torch.Tensor, name.removesuffix("_"), function)


def _computed(tree: Any, drawn: dict[int, torch.Tensor]) -> Any:
    """Replace computations by their results, and arrays by tensors."""

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, RandomValue):
            return leaf.compute(drawn)
        return torch.tensor(leaf) if isinstance(leaf, np.ndarray) else leaf

    return pytree.tree_map(convert, tree)
