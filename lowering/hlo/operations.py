"""Operations of a compiled program by name, as a profiler reports them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from lowering.hlo.collectives import CALLED_BY, COLLECTIVE_OPS, Collective, ProgramReader
from lowering.hlo.text import Computation, Instruction, parse
from lowering.hlo.trip_counts import trip_count
from sharding_rules.mesh import MeshShape

# Operations whose time is that of the operations inside them.
_CONTAINERS = ("while", "conditional", "call")


@dataclass(frozen=True)
class Operation:
    """One instruction that a device executes: a kernel, a fusion, or a collective."""

    name: str
    opcode: str
    count: int  # executions in a step
    flops: float  # of one execution: matrix products
    scope: (
        str  # name stack (op_name in HLO metadata); of a fusion, that of its product if it has one
    )
    collective: Collective | None = None  # of one execution


def read_operations(text: str, mesh: MeshShape, slices: int = 1) -> dict[str, Operation]:
    """Return the operations of an optimized program that are executed by themselves, by name.

    What is inside of a fusion is part of it. A loop whose trip count is unknown counts once.
    """
    reader = ProgramReader(parse(text), mesh, slices)
    return {one.name: one for one in _operations(reader, reader.module.entry, ())}


def program_name(text: str) -> str:
    """Return the name of the module, as in "jit_train"."""
    return text.partition(",")[0].removeprefix("HloModule ").strip()


def _operations(reader: ProgramReader, name: str, loops: tuple[int, ...]) -> Iterator[Operation]:
    computation = reader.module.computations[name]
    for instruction in computation.instructions.values():
        if instruction.opcode in _CONTAINERS:
            within = loops
            if instruction.opcode == "while":
                trips = trip_count(reader.module, computation, instruction)
                within = loops if trips is None else (*loops, trips)
            for inner in _inside(instruction):
                yield from _operations(reader, inner, within)
        elif instruction.opcode not in ("parameter", "constant", "tuple", "get-tuple-element"):
            yield _operation(reader, computation, instruction, loops)


def _inside(instruction: Instruction) -> list[str]:
    names = ("body", "condition", "to_apply", "true_computation", "false_computation")
    called = [inner for name in names if (inner := instruction.attribute(name))]
    return called + instruction.computations("branch_computations")


def _operation(
    reader: ProgramReader,
    computation: Computation,
    instruction: Instruction,
    loops: tuple[int, ...],
) -> Operation:
    base = instruction.opcode.removesuffix("-start")
    collective = None
    if base in COLLECTIVE_OPS:
        collective = reader.read_collective(computation, instruction, base)
    facts = reader.read_instruction(computation, instruction)
    scope = instruction.op_name
    called = instruction.attribute(CALLED_BY[base]) if base in CALLED_BY else None
    if called:
        inner = reader.module.computations[called]
        products = [one for one in inner.instructions.values() if one.opcode == "dot"]
        scope = products[0].op_name if products else scope
        if collective is None and facts.collectives:  # a fusion that sends
            collective = facts.collectives[0]
    if collective is not None:
        collective = replace(collective, loops=(*loops, *collective.loops))
    count = math.prod(loops)
    return Operation(instruction.name, instruction.opcode, count, facts.flops, scope, collective)
