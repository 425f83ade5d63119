"""Graph: one step function with its inputs and outputs, independent of devices."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lowering.trees import Tree, flatten
from sharding_rules.arrays import ArraySpec


@dataclass(frozen=True)
class Graph:
    """A pure function of named trees of arrays, described by shapes, axes and dtypes."""

    name: str
    step: Callable[..., Tree]  # receives the inputs as positional arguments, in order
    inputs: Mapping[str, Tree]  # of ArraySpec
    outputs: Tree  # of ArraySpec
    donated: tuple[str, ...] = ()  # inputs whose buffers the outputs may reuse
    runs_once: bool = False  # prefer a short compilation to fast code
    has_few_rows: bool = False  # its products read a weight for a few rows: do not copy weights
    facts: Mapping[str, Any] = field(default_factory=dict)  # further ones, JSON, for the record

    def arrays(self) -> dict[str, ArraySpec]:
        """Return the spec of every input and output by path; the state has one path for both."""
        return flatten(dict(self.inputs)) | flatten(self.outputs)
