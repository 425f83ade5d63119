"""Provenance of an operation in a compiled program: model source line and inputs of the step."""

from __future__ import annotations

import re

from lowering.hlo.text import Computation, HloModule, Instruction
from lowering.tracing.source_lines import model_line

# Operations whose result is an operand, or part of one, with another location, dtype or layout.
_MOVES = {
    "all-gather",
    "all-gather-done",
    "all-gather-start",
    "bitcast",
    "collective-permute",
    "collective-permute-done",
    "collective-permute-start",
    "convert",
    "copy",
    "copy-done",
    "copy-start",
    "dynamic-slice",
    "optimization-barrier",
    "reduce-precision",
    "reshape",
    "slice",
    "transpose",
}
_KEY = re.compile(r"\['?([^'\]]*)'?\]")
_MAX_STEPS = 400  # instructions to follow before giving up


class Provenance:
    """Tracer of values back to their producers, across computations."""

    def __init__(self, module: HloModule) -> None:
        self.module = module
        self._users: dict[str, dict[str, Instruction]] = {}  # by computation, filled on demand
        self._callers: dict[str, tuple[Computation, Instruction]] = {}
        for computation in module.computations.values():
            for instruction in computation.instructions.values():
                for attribute in ("calls", "to_apply", "body", "condition"):
                    if f"{attribute}=" in instruction.rest:
                        called = instruction.attribute(attribute)
                        self._callers.setdefault(called or "", (computation, instruction))

    def locate(self, computation: Computation, instruction: Instruction) -> tuple[str, str]:
        """Return scope and source line of an operation.

        If it has no metadata, use those of its fusion, of a producer or of a user.
        """
        described = self._with_op_name(computation, instruction)
        if not described.frame:  # in jax 0.11 the op_name of a gathered input is that of the input
            if computation.name not in self._users:
                self._users[computation.name] = _users(computation)
            described = self._users[computation.name].get(instruction.name, described)
        return described.op_name, self._source(described.frame)

    def arrays(
        self, computation: Computation, instruction: Instruction, *, through_loops: bool
    ) -> tuple[str, ...]:
        """Return the paths of the step's inputs that an operation reads unmodified, or a part of.

        With through_loops, a loop is followed to its initial state even if its body changes the
        value, for example the shard that a ring of permutes starts with.
        """
        paths = (self._input(computation, name, through_loops) for name in instruction.operands)
        return tuple(dict.fromkeys(path for path in paths if path))

    def _with_op_name(self, computation: Computation, instruction: Instruction) -> Instruction:
        if instruction.op_name:
            return instruction
        caller = self._callers.get(computation.name)
        if caller and caller[1].opcode == "fusion" and caller[1].op_name:
            return caller[1]
        producers = [instruction]
        for _ in range(3):
            names = [name for each in producers for name in each.operands]
            producers = [i for name in names if (i := computation.instructions.get(name))]
            for each in producers:
                if each.op_name and each.opcode != "parameter":
                    return each
        return instruction

    def _source(self, frame: int) -> str:
        return model_line((each.file, each.line) for each in self.module.stack(frame))

    def _input(self, computation: Computation, name: str, through_loops: bool) -> str | None:
        """Return the path of the entry parameter that a value is, or is a part of; else None."""
        index: int | None = None
        for _ in range(_MAX_STEPS):
            instruction = computation.instructions.get(name)
            if instruction is None:
                return None
            opcode, operands = instruction.opcode, instruction.operands
            if opcode == "parameter":
                if computation.name == self.module.entry:
                    return _path(instruction.op_name)
                outer_value = self._outside(computation, instruction, index, through_loops)
                if outer_value is None:
                    return None
                computation, name = outer_value
            elif opcode == "fusion":
                computation = self.module.computations[instruction.attribute("calls") or ""]
                name = computation.root
            elif opcode == "tuple":
                name, index = operands[index or 0], None
            elif opcode == "while" and (through_loops or self._passes(instruction, index)):
                name = operands[0]
            elif opcode == "dynamic-update-slice":
                name = operands[1]
            elif opcode == "get-tuple-element":
                name, index = operands[0], int(instruction.attribute("index") or 0)
            elif opcode in _MOVES or _is_move(instruction):
                name = operands[index if index and index < len(operands) else 0]
            else:
                return None
        return None

    def _outside(
        self, computation: Computation, parameter: Instruction, index: int | None, through: bool
    ) -> tuple[Computation, str] | None:
        """Return the operand in the caller that is passed to a computation's parameter."""
        caller = self._callers.get(computation.name)
        if caller is None:
            return None
        outer, call = caller
        if call.opcode == "while":
            return (outer, call.operands[0]) if through or self._passes(call, index) else None
        position = int(parameter.arguments)
        return (outer, call.operands[position]) if position < len(call.operands) else None

    def _passes(self, loop: Instruction, index: int | None) -> bool:
        """Return whether a loop leaves an element of its state unchanged, nested loops included."""
        body = self.module.computations[loop.attribute("body") or ""]
        state = body.instructions[body.root]
        if index is None:
            return False
        position: int | None = index
        while True:
            if state.opcode == "tuple" and position is not None:
                state, position = body.instructions[state.operands[position]], None
            elif state.opcode == "get-tuple-element":
                position = int(state.attribute("index") or 0)
                state = body.instructions[state.operands[0]]
            elif state.opcode in ("copy", "bitcast") or (
                state.opcode == "while" and self._passes(state, position)
            ):
                state = body.instructions[state.operands[0]]
            else:
                return state.opcode == "parameter" and position == index


def _users(computation: Computation) -> dict[str, Instruction]:
    """Map each value to its first direct or indirect user that has a source line.

    Users without a source line are followed to their own users. Operands precede their users in
    the text, so one pass from its end finds all.
    """
    instructions = list(computation.instructions.values())
    first_user: dict[str, int] = {}
    for position in reversed(range(len(instructions))):
        user = instructions[position]
        user_position = position if user.frame else first_user.get(user.name)
        if user_position is not None:
            for name in user.operands:
                first_user[name] = min(user_position, first_user.get(name, user_position))
    return {name: instructions[position] for name, position in first_user.items()}


def _is_move(instruction: Instruction) -> bool:
    """Return whether a custom call only copies between memory spaces of one device."""
    return instruction.opcode == "custom-call" and "MoveTo" in instruction.rest


def _path(op_name: str) -> str | None:
    """Convert state['parameters']['head'] to state/parameters/head."""
    argument = op_name.partition("[")[0]
    keys = _KEY.findall(op_name)
    return "/".join((argument, *keys)) if argument else None
