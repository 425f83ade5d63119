"""Loops and branches of HLO: written out where they are decided here, else as control flow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lowering.ascend.control import Control, Function
from lowering.ascend.emitter import Emitter, unsupported
from lowering.ascend.mindir import Tensor
from lowering.ascend.values import Value, known
from lowering.hlo.proto import TYPE_NAMES, TYPES, Message

_UNROLLED = 100_000  # turns of loops, all together: a bound against loops that never end

Run = Callable[[Message, Sequence[Any]], Any]  # a computation of arguments


class Flow:
    """Walks the computations that a loop or a conditional calls."""

    def __init__(self, module: Message, run: Run, control: Control) -> None:
        self._computations = {each.id: each for each in module.computations}
        self._run, self._control = run, control
        self._turns = 0

    def loop(self, instruction: Message, state: tuple[Any, ...]) -> tuple[Any, ...]:
        """The state after the last turn; turns are written out for as long as they are certain."""
        body, condition = (self._computations[i] for i in instruction.called_computation_ids)
        while True:
            goes_on = self._run(condition, [state])
            if goes_on.data is None:
                functions = (
                    self._function(condition, is_tuple=True),
                    self._function(body, is_tuple=True),
                )
                return tuple(self._control.loop(_listed(state), _fixed(body), *functions))
            if not goes_on.data:
                return state
            self._turns += 1
            if self._turns > _UNROLLED:
                raise unsupported(f"graph of more than {_UNROLLED:,} turns of loops")
            state = self._run(body, [state])

    def branch(self, emit: Emitter, instruction: Message, operands: Sequence[Any]) -> Any:
        """What the chosen branch returns."""
        choice, *arguments = operands
        if choice.dtype == "pred":  # the first where it is true
            false = known(np.array(False), "pred")
            choice = emit.cast(emit.compare("Equal", choice, false), "s32")
        called = [self._computations[number] for number in instruction.called_computation_ids]
        if choice.data is not None:
            number = int(choice.data)
            number = number if 0 <= number < len(called) else len(called) - 1
            return self._run(called[number], [arguments[number]])
        is_tuple = instruction.shape.element_type == TYPES["tuple"]
        shapes = instruction.shape.tuple_shapes if is_tuple else [instruction.shape]
        found = self._control.choose(
            choice,
            [_listed(each) for each in arguments],
            [
                self._function(each, is_tuple=isinstance(given, tuple))
                for each, given in zip(called, arguments, strict=True)
            ],
            [Tensor(one.dimensions, emit.stored(TYPE_NAMES[one.element_type])) for one in shapes],
        )
        return tuple(found) if is_tuple else found[0]

    def _function(self, computation: Message, *, is_tuple: bool) -> Function:
        """A computation of one argument, a tuple or not, as a function of lists."""
        return lambda now: _listed(self._run(computation, [tuple(now) if is_tuple else now[0]]))


def _fixed(body: Message) -> set[int]:
    """Numbers of what a turn returns as it was given."""
    by_id = {each.id: each for each in body.instructions}
    return {
        number
        for number, each in enumerate(by_id[i] for i in by_id[body.root_id].operand_ids)
        if each.opcode == "get-tuple-element"
        and each.tuple_index == number
        and by_id[each.operand_ids[0]].opcode == "parameter"
    }


def _listed(values: Value | tuple[Any, ...]) -> list[Value]:
    """A tuple of arrays, or one array, as a list."""
    listed = list(values) if isinstance(values, tuple) else [values]
    if any(isinstance(one, tuple) for one in listed):
        raise unsupported("loop or conditional over tuples of tuples")
    return listed
