"""Loops and conditionals that are decided at run time, as graphs that call each other.

A loop consists of three graphs: its header evaluates the condition, then calls either the body,
which calls the header again, or the end, which returns the state.
Source: what mindspore.export of mindspore 2.10.0 writes for while and if.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import numpy as np

from lowering.ascend.emitter import Emitter
from lowering.ascend.mindir import TensorInfo
from lowering.ascend.values import ArrayValue, constant_value

Values = Sequence[ArrayValue]
Function = Callable[[Values], Values]  # writes into the current graph


class Control:
    """Writer of loops and conditionals over lists of values."""

    def __init__(
        self,
        emit: Emitter,
        rank: Callable[[], ArrayValue | None],
        elsewhere: Callable[..., AbstractContextManager[None]],
    ) -> None:
        """Create a writer.

        Args:
            emit: writes into the current graph.
            rank: returns the program's own rank in the current graph, if it has one.
            elsewhere: context in which another graph is written, with that graph's rank, if any.
        """
        self._emit, self._rank, self._elsewhere = emit, rank, elsewhere
        self._count = 0

    def loop(
        self, state: Values, fixed: set[int], goes_on: Function, turn: Function
    ) -> list[ArrayValue]:
        """Write a loop; return its state after the last iteration.

        Args:
            state: values before the first iteration.
            fixed: indices of the values that no iteration changes.
            goes_on: condition of the loop.
            turn: body of the loop.
        """
        emit, writer, size = self._emit, self._emit.writer, len(state)
        self._count += 1
        header, body, end = (f"{part}.{self._count}" for part in ("loop", "turn", "end"))
        moving = [number for number in range(size) if number not in fixed]
        tensors = [_tensor(state[number]) for number in moving]
        everything = self._with_rank(state)
        # Values that are known and never change are known in every iteration.
        known_ = {n for n in fixed if state[n].data is not None}

        def nodes(values: Values) -> list[str]:
            return [emit.node(one) for n, one in enumerate(values) if n not in known_]

        with writer.function(header):
            now = self._inputs(everything, known_)
            with self._elsewhere(*now[size:]):
                condition = emit.node(goes_on(now[:size])[0])
            ends_with = [emit.node(now[number]) for number in moving]
            chosen = writer.choice(condition, [(body, nodes(now)), (end, ends_with)], tensors)
            writer.return_tuple(chosen, tensors)
        with writer.function(body):
            now = self._inputs(everything, known_)
            with self._elsewhere(*now[size:]):
                after = turn(now[:size])
            after = [now[n] if n in fixed or n == size else after[n] for n in range(len(now))]
            writer.return_tuple(writer.call(header, nodes(after), tensors), tensors)
        with writer.function(end):
            now = self._inputs([state[number] for number in moving], set())
            writer.return_new_tuple([emit.node(one) for one in now], tensors)
        found = self._parts(writer.call(header, nodes(everything), tensors), tensors)
        by_number = dict(zip(moving, found, strict=True))
        return [by_number.get(number, one) for number, one in enumerate(state)]

    def choose(
        self,
        number: ArrayValue,
        arguments: Sequence[Values],
        branches: Sequence[Function],
        tensors: Sequence[TensorInfo],
    ) -> Values:
        """Write a conditional; return the results of the selected branch.

        Args:
            number: index of the branch, from 0; the last branch is selected if it is out of range.
            arguments: arguments of each branch.
            branches: the branches.
            tensors: results of every branch.
        """
        emit, writer = self._emit, self._emit.writer
        if len(branches) == 1:
            return branches[0](arguments[0])

        def others(given: Values) -> Values:
            before, *flat = given
            split, rest = [], iter(flat)
            for each in arguments[1:]:
                split.append([next(rest) for _ in each])
            number = emit.subtract(before, emit.integer(1, before))
            return self.choose(number, split, branches[1:], tensors)

        rest = [number, *(one for each in arguments[1:] for one in each)]
        self._count += 1
        options = [
            self._branch(f"branch.{self._count}.first", arguments[0], branches[0], tensors),
            self._branch(f"branch.{self._count}.others", rest, others, tensors),
        ]
        is_first = emit.compare("Equal", number, emit.integer(0, number))
        return self._parts(writer.choice(emit.node(is_first), options, tensors), tensors)

    def _branch(
        self, name: str, given: Values, function: Function, tensors: Sequence[TensorInfo]
    ) -> tuple[str, list[str]]:
        """Write a branch as a graph; return its name and the nodes that it is called with."""
        emit, writer, size = self._emit, self._emit.writer, len(given)
        everything = self._with_rank(given)
        known_ = {n for n, one in enumerate(given) if one.data is not None}
        with writer.function(name):
            now = self._inputs(everything, known_)
            with self._elsewhere(*now[size:]):
                writer.return_new_tuple([emit.node(one) for one in function(now[:size])], tensors)
        return name, [emit.node(one) for n, one in enumerate(everything) if n not in known_]

    def _with_rank(self, values: Values) -> list[ArrayValue]:
        rank = self._rank()
        return [*values, *([] if rank is None else [rank])]

    def _inputs(self, values: Values, known_: set[int]) -> list[ArrayValue]:
        """Add inputs for values to the current graph; known values remain known."""
        writer = self._emit.writer
        return [
            constant_value(np.asarray(one.data), one.dtype)
            if number in known_
            else ArrayValue(one.shape, one.dtype, node=writer.input(f"input{number}", _tensor(one)))
            for number, one in enumerate(values)
        ]

    def _parts(self, together: str, tensors: Sequence[TensorInfo]) -> list[ArrayValue]:
        return [
            self._emit.tuple_element(together, number, one) for number, one in enumerate(tensors)
        ]


def _tensor(value: ArrayValue) -> TensorInfo:
    return TensorInfo(value.shape, value.dtype)
