"""Graph: one step, its inputs and outputs, no devices."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lowering.trees import Tree, flatten
from sharding_rules.arrays import ArraySpec


@dataclass(frozen=True)
class Graph:
    """A pure function of named trees of arrays, described before any array exists."""

    name: str
    step: Callable[..., Tree]  # takes the inputs by position, in order
    inputs: Mapping[str, Tree]  # of ArraySpec
    outputs: Tree  # of ArraySpec
    donated: tuple[str, ...] = ()  # inputs whose memory the outputs may take
    runs_once: bool = False  # so compile it quickly rather than well

    def arrays(self) -> dict[str, ArraySpec]:
        """Every input and output by path; what a step returns of its state has the same path."""
        return flatten(dict(self.inputs)) | flatten(self.outputs)
