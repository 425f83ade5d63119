"""Division of an imported model's blocks: those in pipeline stages, and those outside of them.

Stages divide the longest run of blocks that repeat, in whole repetitions. Blocks in front of it are
computed with the embedding, blocks behind it with the LM head: every stage computes all of them,
for its share of the microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from graphtrain.torch_frontend.blocks import Stack, UnrolledBlocks, list_lengths
from graphtrain.torch_frontend.model import OpenedModel
from sharding_rules.errors import ShardingError
from sharding_rules.pipeline import Stages, divide_layers

BlockLists = tuple[Stack | UnrolledBlocks, ...]


@dataclass(frozen=True)
class StagedBlocks:
    """Division of a model's blocks into those in stages, in front of them and behind them."""

    stack: Stack  # in stages
    before: BlockLists
    after: BlockLists

    @classmethod
    def of(cls, opened: OpenedModel) -> StagedBlocks:
        """Return the division of a model's blocks.

        Raises:
            ShardingError: the model cannot be split into stages; the message says why.
        """
        lists = opened.block_lists
        if not lists:
            raise cannot_split("its blocks are not in a torch.nn.ModuleList")
        names = list(list_lengths(lists))
        if len(names) > 1:
            raise cannot_split(
                f"its blocks are in several lists ({' and '.join(names)}), and stages can divide "
                "only one"
            )
        if not opened.stacks:
            reasons = [one.reason for one in lists if isinstance(one, UnrolledBlocks)]
            raise cannot_split(f"{names[0]} is traced block by block, because {reasons[0]}")
        stack = max(opened.stacks, key=lambda stack: stack.count)
        place = lists.index(stack)
        return cls(stack, lists[:place], lists[place + 1 :])

    @cached_property
    def _prefixes(self) -> tuple[str, ...]:
        return tuple(f"{self.stack.module_path(place)}/" for place in range(self.stack.period))

    def is_in_stages(self, path: str) -> bool:
        """Return whether the array at this path stacks parameters of the blocks in stages."""
        return path.startswith(self._prefixes)

    def rows(self, stages: Stages) -> Stages:
        """Return the assignment of the rows of stacked arrays, which are repetitions, to stages.

        Args:
            stages: assignment of the blocks, as of [program.pipeline].

        Raises:
            ShardingError: the stages hold other blocks, or parts of a repetition.
        """
        stack, held = self.stack, sum(stages.layers)
        if held != stack.count:
            raise ShardingError(
                f"{self.which()}, but the stages hold {held}; {self._remedy(stages)}"
            )
        if any(layers % stack.period for layers in stages.layers):
            raise ShardingError(
                f"the blocks of {stack.name} repeat every {stack.period} blocks, and each stage "
                f"holds whole repetitions, but the stages hold {_listed(stages.layers)} blocks; "
                f"{self._remedy(stages)}"
            )
        return stages.in_periods(stack.period)

    def which(self) -> str:
        """Return how many blocks can be in stages, and where the others are."""
        stack = self.stack
        total = stack.count + self.outside
        if not self.outside:
            return f"{stack.name} has {total} blocks"
        return (
            f"stages can divide {stack.count} of the {total} blocks of {stack.name} "
            f"({span(stack.numbers[0], stack.numbers[-1])}; {', '.join(self.places())})"
        )

    @property
    def outside(self) -> int:
        """Number of blocks in front of the stages and behind them."""
        return sum(blocks.count for blocks in (*self.before, *self.after))

    def places(self) -> Iterator[str]:
        """Yield where each side of the blocks outside of the stages is computed."""
        sides = (self.before, "with the embedding"), (self.after, "with the LM head")
        for blocks, where in sides:
            if blocks:
                yield f"{span(blocks[0].numbers[0], blocks[-1].numbers[-1])} {where}"

    def _remedy(self, stages: Stages) -> str:
        """Return what to set, so that these stages hold whole repetitions."""
        period, rows = self.stack.period, self.stack.rows
        chunks = stages.stages * stages.rounds
        if rows < chunks:
            kind = "repetitions" if period > 1 else "blocks"
            return (
                f"{rows} {kind} cannot be divided among {chunks} stages; set program.mesh.stage = "
                f"{rows} or less"
            )
        even = divide_layers(rows, stages.stages, stages.rounds).layers
        fitting = [number * period for number in even]
        remedy = f"set program.pipeline.layers_per_stage = {fitting}"
        if self.outside:
            return remedy
        divisors = [number for number in range(1, rows + 1) if rows % number == 0]
        return f"{remedy}, or program.mesh.stage to one of {_listed(divisors)}"


def cannot_split(reason: str) -> ShardingError:
    """Return the error for a model that cannot be split into stages."""
    return ShardingError(
        f"this model cannot be split into pipeline stages: {reason}; set program.mesh.stage = 1 "
        "and split it over fsdp or tensor"
    )


def span(first: int, last: int) -> str:
    """Return the words for the blocks from `first` to `last`."""
    return f"block {first}" if first == last else f"blocks {first} to {last}"


def _listed(numbers: tuple[int, ...] | list[int]) -> str:
    return ", ".join(map(str, numbers))
