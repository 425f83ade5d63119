"""Which blocks of a module are alike, so that one scan runs them all.

Blocks are found in a ModuleList: of one class, with parameters, buffers and settings alike but for
a number that says which block it is. What holds such a number is told apart by tracing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

_NUMBERS = ("layer_idx", "layer_id", "layer_index", "layer_number", "idx", "index", "block_idx")
_PLAIN = (int, float, bool, str, type(None), torch.dtype)


@dataclass(frozen=True)
class Stack:
    """Blocks of a ModuleList that repeat after `period`; their parameters are kept as one."""

    name: str  # of the ModuleList
    count: int  # of blocks
    period: int
    parameters: tuple[tuple[str, ...], ...]  # names inside a block, for each of the period

    @property
    def rows(self) -> int:
        """How often the period repeats."""
        return self.count // self.period

    def path(self, position: int, name: str) -> str:
        """Where a parameter is kept, for all blocks at this position of the period."""
        middle = f"{position}." if self.period > 1 else ""
        return f"{self.name}.{middle}{name}".replace(".", "/")

    def names(self, position: int, name: str) -> list[str]:
        """Of that parameter in the module, by row."""
        return [f"{self.name}.{i}.{name}" for i in range(position, self.count, self.period)]


@dataclass(frozen=True)
class Unrolled:
    """Blocks that are traced one by one, and why."""

    name: str
    count: int
    reason: str


def find_stacks(module: torch.nn.Module) -> list[Stack | Unrolled]:
    """The lists of blocks of a module that are not inside another block."""
    own = set(dict(module.named_parameters()))  # those tied to an earlier one are left out
    found: list[Stack | Unrolled] = []
    for name, inner in module.named_modules():
        inside = any(name.startswith(f"{one.name}.") for one in found)
        if isinstance(inner, torch.nn.ModuleList) and len(inner) > 1 and not inside:
            found.append(_stack(name, inner, own))
    return found


def _stack(name: str, blocks: torch.nn.ModuleList, own: set[str]) -> Stack | Unrolled:
    def unrolled(reason: str) -> Unrolled:
        return Unrolled(name, len(blocks), reason)

    local = [tuple(dict(block.named_parameters())) for block in blocks]
    for number, names in enumerate(local):
        if missing := [one for one in names if f"{name}.{number}.{one}" not in own]:
            return unrolled(f"block {number} shares {missing[0]} with another")
    if not local[0]:
        return unrolled("its blocks have no parameters")
    signatures = [dict(_signature(block)) for block in blocks]
    period = _period(signatures)
    if period is None:
        return unrolled(f"its blocks differ: {_difference(signatures)}")
    return Stack(name, len(blocks), period, tuple(local[:period]))


def _period(signatures: list[dict[str, Any]]) -> int | None:
    """After how many blocks they repeat, at least once and without a remainder."""
    count = len(signatures)
    for period in range(1, count // 2 + 1):
        if count % period == 0 and all(
            signatures[number] == signatures[number % period] for number in range(count)
        ):
            return period
    return None


def _difference(signatures: list[dict[str, Any]]) -> str:
    """What the first block that is not like block 0 has otherwise."""
    first = signatures[0]
    for number, other in enumerate(signatures):
        for path in first | other:
            if first.get(path) != other.get(path):
                return (
                    f"block {number} has {path} = {_short(other.get(path))}, "
                    f"block 0 {_short(first.get(path))}"
                )
    raise AssertionError("blocks without a period are all alike")


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) < 60 else text[:57] + "..."


def _signature(block: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """All that decides what a block computes, by name."""
    for path, inner in block.named_modules():
        prefix = f"{path}." if path else ""
        yield f"{prefix}class", type(inner)
        for name, parameter in inner.named_parameters(recurse=False):
            yield prefix + name, (tuple(parameter.shape), parameter.dtype, parameter.requires_grad)
        for name, buffer in inner.named_buffers(recurse=False):
            yield prefix + name, (buffer.dtype, tuple(buffer.shape), buffer.numpy().tobytes())
        for name, value in vars(inner).items():
            if name not in _NUMBERS and not name.startswith("_"):
                yield prefix + name, _setting(value)


def _setting(value: Any) -> Any:
    """A value that can be compared; another object counts as the same only if it is."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, tuple | list):
        return tuple(map(_setting, value))
    if isinstance(value, Mapping):
        return tuple((str(key), _setting(inner)) for key, inner in value.items())
    if isinstance(value, partial):
        return _setting((value.func, value.args, value.keywords))
    return getattr(value, "__qualname__", None) or id(value)
