"""Calls of the blocks of a stack: their arguments, and placeholders for what they return."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import torch
from torch.utils import _pytree as pytree

from graphtrain.torch_frontend.blocks import Stack
from graphtrain.torch_frontend.bridge import Tensor, TraceEnvironment


class BlocksDiffer(Exception):
    """Blocks of a stack that compute different things, or that the module uses differently."""

    def __init__(self, stack: Stack, reason: str, read: int | None = None) -> None:
        super().__init__(reason)
        self.stack, self.reason = stack, reason
        self.read = read  # number of blocks whose output is read by other code than a block


@dataclass
class BlockCall:
    """Arguments of one block other than the hidden state, and the structure of its output."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    structure: Any = None
    shapes: list[Any] = field(default_factory=list)  # of the output's leaves; None: not a tensor


class Placeholder(Tensor):
    """Placeholder for the output of a block; only its shape and dtype are known."""

    def jax(self) -> jax.Array:
        """Raise BlocksDiffer: code other than the next block reads this output."""
        raise self._why  # pyright: ignore[reportAttributeAccessIssue]


def make_placeholder(array: Any, environment: TraceEnvironment, why: BlocksDiffer) -> Placeholder:
    """Return a placeholder of a shape and dtype; reading it raises `why`."""
    placeholder = Placeholder(jax.ShapeDtypeStruct(array.shape, array.dtype), environment)  # pyright: ignore
    placeholder._why = why  # pyright: ignore[reportAttributeAccessIssue]
    return placeholder


def same_arguments(call: Any, other_call: Any) -> bool:
    """Return true if two calls get the identical tensors and equal other values."""
    leaves, structure = pytree.tree_flatten(call)
    other_leaves, other_structure = pytree.tree_flatten(other_call)
    return structure == other_structure and all(
        a is b or (not isinstance(a, torch.Tensor) and type(a) is type(b) and a == b)
        for a, b in zip(leaves, other_leaves, strict=True)
    )
