"""Names of the arrays of a dump, in the order of execution, and their choice by patterns."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from graphtrain.errors import PlanError
from graphtrain.graphs.names import KINDS
from graphtrain.torch_frontend.block_ranges import blocks_of
from lowering.tracing.recorded_lines import RecordedLines
from lowering.tracing.recording import RecordedArray
from lowering.trees import Tree, flatten

FORWARD, BACKWARD, GRADIENTS = KINDS
_MAX_NAMES = 60  # in an error message


@dataclass(frozen=True)
class NamedArray:
    """One array of a dump: an output of the graph, or the row of one layer in it."""

    kind: str
    path: str  # of the array that stacks all layers
    layer: int | None
    lines: tuple[str, ...]  # of the model's code that made it; empty for a parameter
    loop: str = ""  # name of the loop over layers, with which the path begins

    @property
    def name(self) -> str:
        """Name for users, as in "forward/layers/3/mlp/up"."""
        if self.layer is None:
            return f"{self.kind}/{self.path}"
        rest, layer = self.path.removeprefix(f"{self.loop}/"), self.layer
        parent, _, last = self.loop.rpartition("/")
        blocks = blocks_of(last)
        stem, number = (self.loop, layer) if blocks is None else (parent, blocks[layer])
        return f"{self.kind}/{stem}/{number}/{rest}"


def all_arrays(
    specs: Tree,
    recorded: Mapping[str, RecordedArray],
    lines: RecordedLines,
) -> list[NamedArray]:
    """Return all arrays in the order of execution."""
    forward = list(_unstacked(recorded, lines.making))
    backward = [
        replace(one, kind=BACKWARD, lines=_lines(one.path, recorded, lines.using))
        for one in reversed(forward)
    ]
    return [*forward, *backward, *_parameters(specs, recorded)]


def _lines(
    path: str, recorded: Mapping[str, RecordedArray], found: Mapping[str, Iterable[str]]
) -> tuple[str, ...]:
    """Return the lines that were found for an activation, else the line that names it."""
    return tuple(found.get(path, ())) or (recorded[path].source,)


def _unstacked(
    recorded: Mapping[str, RecordedArray], making: Mapping[str, Iterable[str]]
) -> Iterable[NamedArray]:
    """Yield the activations; all of one layer before those of the next."""
    left = dict(recorded)
    while left:
        path, one = next(iter(left.items()))
        if one.layers is None:
            del left[path]
            yield NamedArray(FORWARD, path, None, _lines(path, recorded, making))
            continue
        inside = {path: left.pop(path) for path in list(left) if left[path].loop == one.loop}
        for layer in range(one.layers):
            for path in inside:
                lines = _lines(path, recorded, making)
                yield NamedArray(FORWARD, path, layer, lines, one.loop)


def _parameters(specs: Tree, recorded: Mapping[str, RecordedArray]) -> Iterable[NamedArray]:
    """Yield the gradients of the parameters, those of the last layers first."""
    paths = list(flatten(specs))
    loops = {one.loop: one.layers for one in recorded.values() if one.layers is not None}
    inside = {
        loop: [path for path in paths if path.startswith(f"{loop}/")] for loop in reversed(loops)
    }
    stacked = {path for found in inside.values() for path in found}
    embedding = [path for path in paths if "embed" in path and path not in stacked]
    for path in paths:
        if path not in stacked and path not in embedding:
            yield NamedArray(GRADIENTS, path, None, ())
    for loop, found in inside.items():
        for layer in reversed(range(loops[loop] or 0)):
            for path in found:
                yield NamedArray(GRADIENTS, path, layer, (), loop)
    for path in embedding:
        yield NamedArray(GRADIENTS, path, None, ())


def choose(patterns: Sequence[str], arrays: Sequence[NamedArray]) -> list[NamedArray]:
    """Return the arrays whose names match a pattern, in their order.

    Raises:
        PlanError: a pattern matches none; the message has the names.
    """
    for pattern in patterns:
        if not any(matches(one.name, pattern) for one in arrays):
            raise PlanError(
                f"program.dump.arrays: no array matches {pattern!r}; the names are "
                f"{_named(arrays)} (graphtrain dump --list prints all)"
            )
    return [one for one in arrays if any(matches(one.name, pattern) for pattern in patterns)]


def matches(name: str, pattern: str) -> bool:
    """Return whether a pattern matches a name, with its kind or, if it names none, without."""
    inner = name.partition("/")[2]
    return fnmatchcase(name if pattern.partition("/")[0] in KINDS else inner, pattern)


def _named(arrays: Sequence[NamedArray]) -> str:
    """Return the names for a message, without their kinds, and each layer's array once."""
    inner = (one.name.partition("/")[2] for one in arrays)
    names = dict.fromkeys(re.sub(r"/\d+/", "/*/", name) for name in inner)
    return ", ".join(list(names)[:_MAX_NAMES]) + (", ..." if len(names) > _MAX_NAMES else "")
