"""Search for identical blocks of a module, which a scan can run.

Blocks are the members of a ModuleList. They are identical if their classes, shapes of parameters,
buffers and attributes agree, except for a layer index. Whether a block computes something else
because of its layer index is checked later, by tracing. A list whose blocks repeat evenly is one
scan; another is divided into scans and single blocks, so that as few blocks as possible are traced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from graphtrain.torch_frontend.block_ranges import range_name

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
    start: int = 0  # number of the first block in the list
    is_whole: bool = True  # the list has no other blocks

    @property
    def rows(self) -> int:
        """Number of repetitions of the period."""
        return self.count // self.period

    @property
    def numbers(self) -> range:
        """Numbers of the blocks in the list."""
        return range(self.start, self.start + self.count)

    @property
    def loop(self) -> str:
        """Name of the scan over the blocks."""
        path = self.name if self.is_whole else f"{self.name}.{range_name(self.numbers)}"
        return path.replace(".", "/")

    def blocks_at(self, position: int) -> range:
        """Return the numbers of the blocks at a position of the period, one per row."""
        return self.numbers[position :: self.period]

    def module_path(self, position: int) -> str:
        """Return the path under which the parameters of a position are stored."""
        if not self.is_whole:
            path = f"{self.name}.{range_name(self.blocks_at(position))}"
        else:
            path = f"{self.name}.{position}" if self.period > 1 else self.name
        return path.replace(".", "/")

    def path(self, position: int, name: str) -> str:
        """Return the path of a stacked parameter, at a position of the period."""
        return f"{self.module_path(position)}/{name.replace('.', '/')}"

    def rows_by_name(self, arrays: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return stacked arrays, given by path, per position of the period by name in a block."""
        return [
            {name: arrays[self.path(position, name)] for name in names}
            for position, names in enumerate(self.parameters)
        ]

    def parameter_names(self, position: int, name: str) -> list[str]:
        """Return that parameter's names in the module, one per row."""
        return [f"{self.name}.{number}.{name}" for number in self.blocks_at(position)]


@dataclass(frozen=True)
class UnrolledBlocks:
    """Blocks of a ModuleList that are traced one by one, and why."""

    name: str
    count: int
    reason: str
    start: int = 0  # number of the first block in the list

    @property
    def numbers(self) -> range:
        """Numbers of the blocks in the list."""
        return range(self.start, self.start + self.count)


def unroll(stack: Stack, reason: str) -> UnrolledBlocks:
    """Return the blocks of a stack as blocks that are traced one by one."""
    return UnrolledBlocks(stack.name, stack.count, reason, stack.start)


def cut_after(stack: Stack, count: int, reason: str) -> list[Stack | UnrolledBlocks]:
    """Return the blocks of a stack as its first `count` blocks, and the others.

    Args:
        stack: blocks that repeat.
        count: number of blocks after which the module reads the hidden state.
        reason: why they are divided, if a part of them is no repetition.
    """
    parts: list[Stack | UnrolledBlocks] = []
    for start, size in ((0, count), (count, stack.count - count)):
        first = stack.start + start
        if start % stack.period == 0 and size % stack.period == 0 and size > stack.period:
            parts.append(replace(stack, count=size, start=first, is_whole=False))
        else:
            parts.append(UnrolledBlocks(stack.name, size, reason, first))
    return parts


def list_lengths(found: Sequence[Stack | UnrolledBlocks]) -> dict[str, int]:
    """Return the number of blocks of each list, by its name."""
    lengths: dict[str, int] = {}
    for blocks in found:
        lengths[blocks.name] = lengths.get(blocks.name, 0) + blocks.count
    return lengths


def find_stacks(module: torch.nn.Module) -> list[Stack | UnrolledBlocks]:
    """Return the blocks of a module in the order of its lists, without lists in other blocks."""
    shared = _shared_parameters(module)
    found: list[Stack | UnrolledBlocks] = []
    for name, inner in module.named_modules():
        is_nested = any(name.startswith(f"{blocks.name}.") for blocks in found)
        if isinstance(inner, torch.nn.ModuleList) and len(inner) > 1 and not is_nested:
            found += _BlockList(name, list(inner), shared).divided()
    return found


def _shared_parameters(module: torch.nn.Module) -> set[str]:
    """Return the names of the parameters that have several names in the module."""
    by_parameter: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        by_parameter.setdefault(id(parameter), []).append(name)
    return {name for names in by_parameter.values() if len(names) > 1 for name in names}


class _BlockList:
    """The blocks of one ModuleList."""

    def __init__(self, name: str, blocks: list[torch.nn.Module], shared: set[str]) -> None:
        self._name, self._count = name, len(blocks)
        self._parameters = [tuple(dict(block.named_parameters())) for block in blocks]
        self._signatures = [dict(_signature(block)) for block in blocks]
        self._obstacles = [self._obstacle(number, shared) for number in range(len(blocks))]

    def _obstacle(self, number: int, shared: set[str]) -> str:
        """Return why a block can be in no stack; empty if it can."""
        names = self._parameters[number]
        if not names:
            return "its blocks have no parameters"
        tied = [name for name in names if f"{self._name}.{number}.{name}" in shared]
        tied_text = "block {} shares its parameter {} with another module"
        return tied_text.format(number, tied[0]) if tied else ""

    def divided(self) -> list[Stack | UnrolledBlocks]:
        """Return the blocks as stacks and blocks that are traced one by one, in order."""
        if not any(self._obstacles) and (period := _period(self._signatures)) is not None:
            return [self._stack(0, self._count, period, is_whole=True)]
        kinds: list[int | None] = [
            None if obstacle else self._signatures.index(signature)
            for obstacle, signature in zip(self._obstacles, self._signatures, strict=True)
        ]
        found: list[Stack | UnrolledBlocks] = []
        for start, count, period in divide(kinds):
            if period:
                found.append(self._stack(start, count, period, is_whole=False))
            else:
                found.append(UnrolledBlocks(self._name, count, self._reason(start, count), start))
        return found

    def _stack(self, start: int, count: int, period: int, *, is_whole: bool) -> Stack:
        names = tuple(self._parameters[start : start + period])
        return Stack(self._name, count, period, names, start, is_whole)

    def _reason(self, start: int, count: int) -> str:
        """Return why blocks are in no stack."""
        obstacles = [obstacle for obstacle in self._obstacles[start : start + count] if obstacle]
        return obstacles[0] if obstacles else f"its blocks differ: {_difference(self._signatures)}"


def divide(kinds: Sequence[int | None]) -> list[tuple[int, int, int]]:
    """Divide blocks into few runs that repeat, so that few blocks have to be traced.

    Args:
        kinds: number of each block's kind; None for a block that can be in no run.

    Returns:
        Start, number of blocks and period of each run; the period is 0 for blocks that do not
        repeat, which are traced one by one.
    """
    # Best division of the blocks from each number on: blocks traced plus number of runs, the runs.
    best: dict[int, tuple[int, list[tuple[int, int, int]]]] = {len(kinds): (0, [])}
    for start in reversed(range(len(kinds))):
        choices = []
        for count, period in [(1, 0), *_repetitions(kinds[start:])]:
            cost, rest = best[start + count]
            choices.append((cost + (period or 1) + 1, [(start, count, period), *rest]))
        # Of divisions that are as good, the one whose first run is longest.
        best[start] = min(choices, key=lambda choice: (choice[0], -choice[1][0][1]))
    return _with_joined_singles(best[0][1])


def _repetitions(kinds: Sequence[int | None]) -> Iterator[tuple[int, int]]:
    """Yield number of blocks and period of all runs that begin with the first block."""
    if None in kinds:
        kinds = kinds[: list(kinds).index(None)]
    for period in range(1, len(kinds) // 2 + 1):
        for count in range(2 * period, len(kinds) + 1, period):
            if kinds[count - period : count] != kinds[:period]:
                break
            yield count, period


def _with_joined_singles(runs: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Join neighbouring blocks that do not repeat."""
    joined: list[tuple[int, int, int]] = []
    for start, count, period in runs:
        if joined and not period and not joined[-1][2]:
            first, before, _ = joined.pop()
            start, count = first, before + count
        joined.append((start, count, period))
    return joined


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
