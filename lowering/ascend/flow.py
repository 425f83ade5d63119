"""HLO loops and conditionals: unrolled or resolved in translation if known, else control flow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lowering.ascend.control import Control, Function
from lowering.ascend.emitter import Emitter, unsupported
from lowering.ascend.mindir import TensorInfo
from lowering.ascend.values import ArrayValue, constant_value
from lowering.hlo.proto import TYPE_NAMES, TYPES, Message

_MAX_UNROLLED_ITERATIONS = (
    100_000  # iterations of all loops together; a bound against endless loops
)

Run = Callable[[Message, Sequence[Any]], Any]  # translates a computation for arguments


class ControlFlow:
    """Translator of loops and conditionals, with the computations that they call."""

    def __init__(self, module: Message, run: Run, control: Control) -> None:
        self._computations = {each.id: each for each in module.computations}
        self._run, self._control = run, control
        self._turns = 0

    def loop(self, instruction: Message, state: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the state after the last iteration; unroll while the condition is known."""
        body, condition = (self._computations[i] for i in instruction.called_computation_ids)
        while True:
            goes_on = self._run(condition, [state])
            if goes_on.data is None:
                functions = (
                    self._function(condition, is_tuple=True),
                    self._function(body, is_tuple=True),
                )
                return tuple(
                    self._control.loop(_as_list(state), _loop_invariants(body), *functions)
                )
            if not goes_on.data:
                return state
            self._turns += 1
            if self._turns > _MAX_UNROLLED_ITERATIONS:
                raise unsupported(
                    f"a graph with more than {_MAX_UNROLLED_ITERATIONS:,} unrolled loop iterations"
                )
            state = self._run(body, [state])

    def branch(self, emit: Emitter, instruction: Message, operands: Sequence[Any]) -> Any:
        """Return the results of the selected branch."""
        choice, *arguments = operands
        if choice.dtype == "pred":  # true selects the first branch
            false = constant_value(np.array(False), "pred")
            choice = emit.cast(emit.compare("Equal", choice, false), "s32")
        called = [self._computations[index] for index in instruction.called_computation_ids]
        if choice.data is not None:
            index = int(choice.data)
            index = index if 0 <= index < len(called) else len(called) - 1
            return self._run(called[index], [arguments[index]])
        is_tuple = instruction.shape.element_type == TYPES["tuple"]
        shapes = instruction.shape.tuple_shapes if is_tuple else [instruction.shape]
        results = self._control.choose(
            choice,
            [_as_list(each) for each in arguments],
            [
                self._function(each, is_tuple=isinstance(argument, tuple))
                for each, argument in zip(called, arguments, strict=True)
            ],
            [
                TensorInfo(shape.dimensions, emit.storage_type(TYPE_NAMES[shape.element_type]))
                for shape in shapes
            ],
        )
        return tuple(results) if is_tuple else results[0]

    def _function(self, computation: Message, *, is_tuple: bool) -> Function:
        """Return a computation of one argument, a tuple or not, as a function of lists."""
        return lambda now: _as_list(self._run(computation, [tuple(now) if is_tuple else now[0]]))


def _loop_invariants(body: Message) -> set[int]:
    """Return the indices of state elements that the loop's body returns unchanged."""
    by_id = {each.id: each for each in body.instructions}
    return {
        index
        for index, each in enumerate(by_id[i] for i in by_id[body.root_id].operand_ids)
        if each.opcode == "get-tuple-element"
        and each.tuple_index == index
        and by_id[each.operand_ids[0]].opcode == "parameter"
    }


def _as_list(values: ArrayValue | tuple[Any, ...]) -> list[ArrayValue]:
    """Return a tuple of arrays, or one array, as a list."""
    listed = list(values) if isinstance(values, tuple) else [values]
    if any(isinstance(value, tuple) for value in listed):
        raise unsupported("a loop or conditional over tuples of tuples")
    return listed
