"""What in a module's forward pass a trace is known to lose."""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import torch
import torchax
from torch.utils._python_dispatch import TorchDispatchMode


def likely_causes(module: torch.nn.Module, tokens: torch.Tensor) -> list[str]:
    """Writes through views and writes without gradients, in an eager forward pass, by line."""
    watch = _Watch()
    with watch:
        try:
            module(tokens)
        except Exception:  # what a module does with its arguments is not ours to judge here
            return []
    return list(watch.found)


class _Watch(TorchDispatchMode):
    """Notes operations that change a tensor others look at."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, None] = {}
        self._shared: set[int] = set()  # storages that a view looks at
        self._kept: list[Any] = []  # so that no storage's address is used again

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict | None = None
    ) -> Any:
        target = args[0] if args else None
        if func._schema.is_mutable and isinstance(target, torch.Tensor):
            name = func.__name__.partition(".")[0]
            if _address(target) in self._shared:
                self.found[
                    f"{name} at {_line()} writes in place into memory that a view shares; write "
                    "into a copy (.clone()), or make a new tensor"
                ] = None
            elif not torch.is_grad_enabled():
                self.found[f"{name} at {_line()} writes in place without gradients"] = None
        result = func(*args, **(kwargs or {}))
        if _is_view(result, target):
            self._shared.add(_address(result))
            self._kept.append(result)
        return result


def _is_view(result: Any, of: Any) -> bool:
    tensors = isinstance(result, torch.Tensor) and isinstance(of, torch.Tensor)
    return tensors and result is not of and _address(result) == _address(of)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if not tensor.is_meta else id(tensor)


def _line() -> str:
    return innermost(traceback.extract_stack())


def innermost(frames: Sequence[traceback.FrameSummary]) -> str:
    """The last line that is neither ours nor of what traces, as "model.py:12"."""
    packages = (jax, torch, torchax)
    foreign = [str(Path(one.__file__ or "").parent) + os.sep for one in packages]
    foreign.append(str(Path(__file__).parent) + os.sep)
    own = [one for one in frames if not one.filename.startswith(tuple(foreign))]
    last = (own or frames)[-1]
    return f"{last.filename}:{last.lineno}"
