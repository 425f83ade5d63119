"""Trip counts of the loops of a compiled program."""

from __future__ import annotations

import re

from lowering.hlo.text import Computation, HloModule, Instruction

_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_SAME_VALUE = ("bitcast", "convert", "copy", "reshape", "copy-start", "copy-done")


def trip_count(module: HloModule, caller: Computation, loop: Instruction) -> int | None:
    """Return the trip count of a while loop, or None if it is unknown.

    CPU and GPU programs contain the count. In TPU programs it is derived from a constant start,
    step and end; collective-matmul loops have a step of 2.
    """
    if match := _KNOWN.search(loop.rest):
        return int(match[1])
    condition = module.computations[loop.attribute("condition") or ""]
    body = module.computations[loop.attribute("body") or ""]
    test = condition.instructions[condition.root]
    if test.opcode == "fusion":
        test, condition = _inside(module, condition, test)
    if test.opcode != "compare" or test.attribute("direction") not in ("LT", "LE"):
        return None
    counter, limit = test.operands
    index = _index(condition, counter)
    start, step = _start(caller, loop, index), _step(module, body, index)
    end = _constant(condition, limit)
    if end is None or start is None or not step:
        return None
    end += test.attribute("direction") == "LE"
    return max(0, -(-(end - start) // step))


def _inside(
    module: HloModule, computation: Computation, fusion: Instruction
) -> tuple[Instruction, Computation]:
    """Return the root of a fusion, and its computation with parameters replaced by operands."""
    fused = module.computations[fusion.attribute("calls") or ""]
    instructions = dict(fused.instructions)
    for name, instruction in fused.instructions.items():
        if instruction.opcode == "parameter":
            operand = fusion.operands[int(instruction.arguments)]
            instructions[name] = computation.instructions[operand]
    outer = {**computation.instructions, **instructions}
    return instructions[fused.root], Computation(fused.name, outer, fused.root)


def _origin(computation: Computation, name: str) -> Instruction:
    """Return the instruction that computes a value; skip those that only move or convert it."""
    instruction = computation.instructions[name]
    while instruction.opcode in _SAME_VALUE:
        instruction = computation.instructions[instruction.operands[0]]
    return instruction


def _constant(computation: Computation, name: str) -> int | None:
    origin = _origin(computation, name)
    is_number = origin.opcode == "constant" and origin.arguments.lstrip("-").isdigit()
    return int(origin.arguments) if is_number else None


def _index(computation: Computation, name: str) -> int | None:
    """Return the index of a value in the loop's state tuple; None if it is not an element."""
    origin = _origin(computation, name)
    if origin.opcode != "get-tuple-element":
        return None
    return int(origin.attribute("index") or 0)


def _start(caller: Computation, loop: Instruction, index: int | None) -> int | None:
    state = _origin(caller, loop.operands[0])
    if index is None or state.opcode != "tuple":
        return None
    return _constant(caller, state.operands[index])


def _step(module: HloModule, body: Computation, index: int | None) -> int | None:
    """Return the constant that the body adds to the counter; None if there is none."""
    state = body.instructions[body.root]
    if index is None or state.opcode != "tuple":
        return None
    added = _origin(body, state.operands[index])
    if added.opcode == "fusion":
        added, body = _inside(module, body, added)
    if added.opcode != "add":
        return None
    steps = [_constant(body, name) for name in added.operands]
    counters = [_index(body, name) for name in added.operands]
    constant_steps = [step for step in steps if step is not None]
    return constant_steps[0] if len(constant_steps) == 1 and index in counters else None
