"""Detection of operations in a module's forward pass that a trace silently loses."""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import torch
import torchax
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

import lowering
from graphtrain.errors import ImportedModelError
from graphtrain.torch_frontend import private_torch

_OWN_PACKAGES = ("graphtrain.", "lowering.", "sharding_rules.")
_PROPAGATED_VIEWS = ("__getitem__",)  # views whose writes torchax propagates


def likely_causes(module: torch.nn.Module, tokens: torch.Tensor) -> list[str]:
    """Return writes through views or under no_grad in an eager forward pass, with their lines."""
    recorder = InPlaceWriteRecorder()
    with recorder:
        try:
            module(tokens)
        except Exception:  # causes are optional; the mismatch is reported anyway
            return []
    advice = "; write into a copy (.clone()), or make a new tensor"
    return [write + advice for write in recorder.through_views] + recorder.without_gradients


class InPlaceWriteRecorder(TorchFunctionMode):
    """Mode that records in-place writes to parameters, to views, or under no_grad.

    Args:
        parameters: The module's parameters by name.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor] | None = None) -> None:
        super().__init__()
        self._parameters = {
            private_torch.storage_id(one): name for name, one in (parameters or {}).items()
        }
        self.to_parameters: list[str] = []
        self.through_views: list[str] = []
        self.without_gradients: list[str] = []
        self._shared: set[int] = set()  # ids of storages that have views
        self._alive: list[torch.Tensor] = []  # keeps storages alive, so that ids stay unique

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict | None = None
    ) -> Any:
        inputs = _tensors((args, kwargs))
        versions = [private_torch.writes(tensor) for tensor in inputs]
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        for tensor, version in zip(inputs, versions, strict=True):
            if private_torch.writes(tensor) != version:
                self._record_write(tensor, name)
                break
        input_ids, input_storages = (
            {id(tensor) for tensor in inputs},
            {private_torch.storage_id(tensor) for tensor in inputs},
        )
        for tensor in _tensors(result):
            if (
                id(tensor) not in input_ids
                and private_torch.storage_id(tensor) in input_storages
                and name not in _PROPAGATED_VIEWS
            ):
                self._shared.add(private_torch.storage_id(tensor))
                self._alive.append(tensor)
        return result

    def _record_write(self, tensor: torch.Tensor, name: str) -> None:
        if parameter := self._parameters.get(private_torch.storage_id(tensor)):
            records = self.to_parameters
            description = f"{name} at {current_user_line()} writes into its parameter {parameter}"
        elif private_torch.storage_id(tensor) in self._shared:
            records, description = (
                self.through_views,
                f"{name} at {current_user_line()} writes through a view",
            )
        elif not torch.is_grad_enabled():
            records = self.without_gradients
            description = f"{name} at {current_user_line()} writes in place under no_grad"
        else:
            return
        if description not in records:
            records.append(description)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def current_user_line() -> str:
    """Return the line of the module's own code that is being executed."""
    return innermost_user_line(traceback.extract_stack())


def innermost_user_line(frames: Sequence[traceback.FrameSummary]) -> str:
    """Return the last line outside graphtrain, JAX and PyTorch, for example "model.py:12"."""
    last = (_user_frames(frames) or frames)[-1]
    return f"{last.filename}:{last.lineno}"


def user_code_error(who: str, error: Exception | SystemExit) -> Exception | SystemExit:
    """Return an error that says what the module's code raised, and in which line.

    An error of graphtrain itself is returned unchanged.
    """
    if type(error).__module__.startswith(_OWN_PACKAGES):
        return error
    frames = _user_frames(traceback.extract_tb(error.__traceback__))
    location = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    message = str(error).partition("\nFor simplicity, JAX")[0] or "without a message"
    return ImportedModelError(f"{who} raises {type(error).__name__}{location}: {message}")


def _user_frames(frames: Sequence[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Return the frames outside graphtrain, JAX and PyTorch."""
    packages = (jax, torch, torchax, lowering)
    excluded_prefixes = [str(Path(package.__file__ or "").parent) + os.sep for package in packages]
    excluded_prefixes.append(str(Path(__file__).parents[1]) + os.sep)
    excluded_prefixes += ["<frozen", os.path.dirname(os.__file__) + os.sep + "importlib"]
    return [frame for frame in frames if not frame.filename.startswith(tuple(excluded_prefixes))]
