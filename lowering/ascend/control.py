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
        header, body, end = (f"{prefix}.{self._count}" for prefix in ("loop", "turn", "end"))
        changing = [index for index in range(size) if index not in fixed]
        tensors = [_tensor(state[index]) for index in changing]
        all_values = self._with_rank(state)
        # Values that are known and never change are known in every iteration.
        known_indices = {n for n in fixed if state[n].data is not None}

        def nodes(values: Values) -> list[str]:
            return [emit.node(value) for n, value in enumerate(values) if n not in known_indices]

        with writer.function(header):
            inputs = self._inputs(all_values, known_indices)
            with self._elsewhere(*inputs[size:]):
                condition = emit.node(goes_on(inputs[:size])[0])
            final_nodes = [emit.node(inputs[index]) for index in changing]
            chosen = writer.choice(condition, [(body, nodes(inputs)), (end, final_nodes)], tensors)
            writer.return_tuple(chosen, tensors)
        with writer.function(body):
            inputs = self._inputs(all_values, known_indices)
            with self._elsewhere(*inputs[size:]):
                new_state = turn(inputs[:size])
            new_state = [
                inputs[n] if n in fixed or n == size else new_state[n] for n in range(len(inputs))
            ]
            writer.return_tuple(writer.call(header, nodes(new_state), tensors), tensors)
        with writer.function(end):
            inputs = self._inputs([state[index] for index in changing], set())
            writer.return_new_tuple([emit.node(value) for value in inputs], tensors)
        results = self._tuple_elements(writer.call(header, nodes(all_values), tensors), tensors)
        result_by_index = dict(zip(changing, results, strict=True))
        return [result_by_index.get(index, value) for index, value in enumerate(state)]

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

        def remaining_branches(inputs: Values) -> Values:
            previous_index, *flat_arguments = inputs
            split, argument_iter = [], iter(flat_arguments)
            for each in arguments[1:]:
                split.append([next(argument_iter) for _ in each])
            next_index = emit.subtract(previous_index, emit.integer(1, previous_index))
            return self.choose(next_index, split, branches[1:], tensors)

        remaining_inputs = [number, *(value for each in arguments[1:] for value in each)]
        self._count += 1
        options = [
            self._branch(f"branch.{self._count}.first", arguments[0], branches[0], tensors),
            self._branch(
                f"branch.{self._count}.others", remaining_inputs, remaining_branches, tensors
            ),
        ]
        is_first = emit.compare("Equal", number, emit.integer(0, number))
        return self._tuple_elements(writer.choice(emit.node(is_first), options, tensors), tensors)

    def _branch(
        self, name: str, arguments: Values, function: Function, tensors: Sequence[TensorInfo]
    ) -> tuple[str, list[str]]:
        """Write a branch as a graph; return its name and the nodes that it is called with."""
        emit, writer, size = self._emit, self._emit.writer, len(arguments)
        all_values = self._with_rank(arguments)
        known_indices = {n for n, value in enumerate(arguments) if value.data is not None}
        with writer.function(name):
            inputs = self._inputs(all_values, known_indices)
            with self._elsewhere(*inputs[size:]):
                writer.return_new_tuple(
                    [emit.node(value) for value in function(inputs[:size])], tensors
                )
        return name, [
            emit.node(value) for n, value in enumerate(all_values) if n not in known_indices
        ]

    def _with_rank(self, values: Values) -> list[ArrayValue]:
        rank = self._rank()
        return [*values, *([] if rank is None else [rank])]

    def _inputs(self, values: Values, known_indices: set[int]) -> list[ArrayValue]:
        """Add inputs for values to the current graph; known values remain known."""
        writer = self._emit.writer
        return [
            constant_value(np.asarray(value.data), value.dtype)
            if index in known_indices
            else ArrayValue(
                value.shape, value.dtype, node=writer.input(f"input{index}", _tensor(value))
            )
            for index, value in enumerate(values)
        ]

    def _tuple_elements(self, tuple_node: str, tensors: Sequence[TensorInfo]) -> list[ArrayValue]:
        return [
            self._emit.tuple_element(tuple_node, index, tensor)
            for index, tensor in enumerate(tensors)
        ]


def _tensor(value: ArrayValue) -> TensorInfo:
    return TensorInfo(value.shape, value.dtype)
