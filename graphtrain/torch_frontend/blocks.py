"""Search for identical blocks of a module, which one scan can run.

Blocks are the members of a ModuleList. They are identical if their classes, shapes of parameters,
buffers and attributes agree, except for a layer index. Whether a block computes something else
because of its layer index is checked later, by tracing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

_INDEX_ATTRIBUTES = (
    "layer_idx",
    "layer_id",
    "layer_index",
    "layer_number",
    "idx",
    "index",
    "block_idx",
)
_PLAIN = (int, float, bool, str, type(None), torch.dtype)


@dataclass(frozen=True)
class Stack:
    """Blocks of a ModuleList that repeat after `period` blocks and run as one scan.

    Each parameter is stored as one array with a leading layer axis.
    """

    name: str  # of the ModuleList
    count: int  # number of blocks
    period: int  # number of blocks after which they repeat
    parameters: tuple[tuple[str, ...], ...]  # names in a block, per position of the period

    @property
    def rows(self) -> int:
        """Number of repetitions of the period."""
        return self.count // self.period

    def path(self, position: int, name: str) -> str:
        """Return the path of a stacked parameter, at a position of the period."""
        middle = f"{position}." if self.period > 1 else ""
        return f"{self.name}.{middle}{name}".replace(".", "/")

    def parameter_names(self, position: int, name: str) -> list[str]:
        """Return that parameter's names in the module, one per row."""
        return [f"{self.name}.{i}.{name}" for i in range(position, self.count, self.period)]


@dataclass(frozen=True)
class UnrolledBlocks:
    """Blocks of a ModuleList that are traced one by one, and why."""

    name: str
    count: int
    reason: str


def find_stacks(module: torch.nn.Module) -> list[Stack | UnrolledBlocks]:
    """Return the lists of blocks of a module, without lists nested in other blocks."""
    owned_parameters = set(dict(module.named_parameters()))  # without those tied to an earlier one
    block_lists: list[Stack | UnrolledBlocks] = []
    for name, inner in module.named_modules():
        is_nested = any(name.startswith(f"{block_list.name}.") for block_list in block_lists)
        if isinstance(inner, torch.nn.ModuleList) and len(inner) > 1 and not is_nested:
            block_lists.append(_stack(name, inner, owned_parameters))
    return block_lists


def _stack(
    name: str, blocks: torch.nn.ModuleList, owned_parameters: set[str]
) -> Stack | UnrolledBlocks:
    def unrolled(reason: str) -> UnrolledBlocks:
        return UnrolledBlocks(name, len(blocks), reason)

    parameter_names = [tuple(dict(block.named_parameters())) for block in blocks]
    for number, names in enumerate(parameter_names):
        if missing := [
            parameter_name
            for parameter_name in names
            if f"{name}.{number}.{parameter_name}" not in owned_parameters
        ]:
            return unrolled(f"block {number} shares its parameter {missing[0]} with another module")
    if not parameter_names[0]:
        return unrolled("its blocks have no parameters")
    signatures = [dict(_signature(block)) for block in blocks]
    period = _period(signatures)
    if period is None:
        return unrolled(f"its blocks differ: {_difference(signatures)}")
    return Stack(name, len(blocks), period, tuple(parameter_names[:period]))


def _period(signatures: list[dict[str, Any]]) -> int | None:
    """Return the number of blocks after which they repeat; None if they do not.

    A period must divide the number of blocks and occur at least twice.
    """
    count = len(signatures)
    for period in range(1, count // 2 + 1):
        if count % period == 0 and all(
            signatures[number] == signatures[number % period] for number in range(count)
        ):
            return period
    return None


def _difference(signatures: list[dict[str, Any]]) -> str:
    """Describe the first difference between block 0 and another block."""
    first = signatures[0]
    for number, signature in enumerate(signatures):
        for path in first | signature:
            if first.get(path) != signature.get(path):
                return (
                    f"block {number} has {path} = {_short(signature.get(path))}, "
                    f"block 0 {_short(first.get(path))}"
                )
    raise AssertionError("blocks without a period are all alike")


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) < 60 else text[:57] + "..."


def _signature(block: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield, by name, everything that determines what a block computes."""
    for path, inner in block.named_modules():
        prefix = f"{path}." if path else ""
        yield f"{prefix}class", type(inner)
        for name, parameter in inner.named_parameters(recurse=False):
            yield prefix + name, (tuple(parameter.shape), parameter.dtype, parameter.requires_grad)
        for name, buffer in inner.named_buffers(recurse=False):
            yield prefix + name, (buffer.dtype, tuple(buffer.shape), buffer.numpy().tobytes())
        for name, value in vars(inner).items():
            if name not in _INDEX_ATTRIBUTES and not name.startswith("_"):
                yield prefix + name, _setting(value)


def _setting(value: Any) -> Any:
    """Convert an attribute to a comparable value; other objects compare by identity."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, tuple | list):
        return tuple(map(_setting, value))
    if isinstance(value, Mapping):
        return tuple((str(key), _setting(inner)) for key, inner in value.items())
    if isinstance(value, partial):
        return _setting((value.func, value.args, value.keywords))
    return getattr(value, "__qualname__", None) or id(value)
