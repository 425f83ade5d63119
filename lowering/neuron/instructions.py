"""Estimate the number of instructions that neuronx-cc generates for a module, from tile sizes.

The compiler cuts every array into tiles and generates an instruction for each. A matrix product
takes one for every 128 elements of the contracted axes, 128 of one side and 512 of the other
(limits of the tensor engine); every other operation takes one for 128 x 512 elements, a transpose
one for 128 x 128. Operations that move no data are free, and a collective counts as one. There is
no special formula for convolutions, since no model has one.
Source: AWS Neuron documentation, nki.isa.nc_matmul and the architecture of Trainium, SDK 2.32.

Loops are counted in two ways. JAX on Neuron supports static loops only, and the scripts of AWS and
AXLearn unroll them (NEURON_WHILE_LOOP_UNROLL=1), which `unrolled` counts; `once` counts each loop
body once, as if the compiler kept every loop. Preflight compares both with the limit.

Two published counts come with sizes, so that the estimate can be compared with them: a training
step of SmolLM2-360M on 8 x 2048 tokens on one core of a trn1 has 37,536,776 instructions, 3.4 times
the estimate; 4096 products of a vector and a 4096 x 4096 matrix have 4,194,304, 4 times the
estimate. Expect such factors, and larger ones where a layout suits the compiler badly.
Source: reports of trn1 users with the compiler messages NCC_EVRF007 and NCC_EXTP003, August and
September 2026; the sizes of the second are derived from the memory that its message reports.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from lowering.hlo.proto import TYPES, Message

UNDERESTIMATE_FACTOR = 4  # factor by which an estimate was below a published count
_ROWS, _COLUMNS = 128, 512
_FREE = frozenset(
    [
        "after-all",
        "bitcast",
        "broadcast",
        "constant",
        "get-tuple-element",
        "iota",
        "opt-barrier",
        "parameter",
        "partition-id",
        "reshape",
        "tuple",
    ]
)
_COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "reduce-scatter", "collective-permute")
# The operand whose size determines the work, for operations where it is not the result's size.
_SIZED_BY = {"reduce": 0, "reduce-window": 0, "dynamic-update-slice": 1, "scatter": 2}


@dataclass(frozen=True)
class InstructionCount:
    """Estimated instruction counts of a module or of a part of it."""

    unrolled: int = 0  # with the body of every loop times its number of iterations
    loops_once: int = 0  # with the body of every loop once
    largest: int = 0  # of the operation that takes most
    largest_id: int = 0  # id of that operation

    def __add__(self, other: InstructionCount) -> InstructionCount:
        larger = max(self, other, key=lambda count: count.largest)
        return replace(
            larger,
            unrolled=self.unrolled + other.unrolled,
            loops_once=self.loops_once + other.loops_once,
        )


def estimate(module: Message) -> InstructionCount:
    """Estimate the instructions of a complete module."""
    computations = {computation.id: computation for computation in module.computations}
    return _count(computations[module.entry_computation_id], computations)


def _count(computation: Message, computations: Mapping[int, Message]) -> InstructionCount:
    by_id = {instruction.id: instruction for instruction in computation.instructions}
    total = InstructionCount()
    for instruction in computation.instructions:
        if instruction.opcode == "while":
            loop_computations = [
                computations[computation_id]
                for computation_id in instruction.called_computation_ids
            ]
            per_iteration = sum(
                (_count(loop_computation, computations) for loop_computation in loop_computations),
                InstructionCount(),
            )
            total += replace(
                per_iteration, unrolled=_trip_count(loop_computations[1]) * per_iteration.unrolled
            )
        elif instruction.opcode in ("call", "fusion"):
            for computation_id in instruction.called_computation_ids:
                total += _count(computations[computation_id], computations)
        else:
            count = _count_one(instruction, by_id)
            total += InstructionCount(count, count, count, instruction.id)
    return total


def _count_one(instruction: Message, by_id: Mapping[int, Message]) -> int:
    if instruction.opcode in _FREE:
        return 0
    if instruction.opcode in _COLLECTIVES:
        return 1
    if instruction.opcode == "dot":
        return _count_dot(instruction, by_id)
    sized = (
        by_id[instruction.operand_ids[_SIZED_BY[instruction.opcode]]]
        if instruction.opcode in _SIZED_BY
        else instruction
    )
    columns = _ROWS if instruction.opcode == "transpose" else _COLUMNS
    return _ceil_div(_elements(sized.shape), _ROWS * columns)


def _count_dot(instruction: Message, by_id: Mapping[int, Message]) -> int:
    left, right = (by_id[operand_id].shape.dimensions for operand_id in instruction.operand_ids)
    dim_numbers = instruction.dot_dimension_numbers
    batch = math.prod(left[axis] for axis in dim_numbers.lhs_batch_dimensions)
    contracted = math.prod(left[axis] for axis in dim_numbers.lhs_contracting_dimensions)
    rows, columns = (math.prod(side) // (batch * contracted) for side in (left, right))
    tiles = min(
        _ceil_div(rows, _ROWS) * _ceil_div(columns, _COLUMNS),
        _ceil_div(rows, _COLUMNS) * _ceil_div(columns, _ROWS),
    )
    return batch * _ceil_div(contracted, _ROWS) * tiles


def _ceil_div(size: int, tile: int) -> int:
    return -(-size // tile)


def _elements(shape: Message) -> int:
    if shape.element_type == TYPES["tuple"]:
        return sum(map(_elements, shape.tuple_shapes))
    return math.prod(shape.dimensions)


def _trip_count(condition: Message) -> int:
    """Return the constant that a loop's counter is compared with; 1 if it is not constant."""
    by_id = {instruction.id: instruction for instruction in condition.instructions}
    root = by_id[condition.root_id]
    for operand_id in root.operand_ids:
        literal = by_id[operand_id].literal
        values = [*literal.s32s, *literal.s64s, *literal.u32s, *literal.u64s]
        if by_id[operand_id].opcode == "constant" and values:
            return int(values[0])
    return 1
