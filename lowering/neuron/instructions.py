"""How many instructions neuronx-cc would make of a module: an estimate, and a rough one.

The compiler unrolls loops and cuts every array into tiles, and its limit counts those tiles. Its
own count cannot be had without it, so this one is only good for the order of magnitude: a product
takes an instruction for every tile of its result and of what it sums over, everything else one for
every tile of its result. Tiles are those of the tensor engine (128 rows, 512 columns; Neuron
architecture documentation) and of the other engines (128 partitions).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from lowering.neuron.proto import Message

_ROWS, _COLUMNS = 128, 512
_MOVES = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "reshape", "while")


def estimate(module: Message) -> int:
    """Instructions of the whole module, with every loop as often as it runs."""
    computations = {each.id: each for each in module.computations}
    (entry,) = (each for each in module.computations if each.id == module.entry_computation_id)
    return _of(entry, computations)


def _of(computation: Message, computations: Mapping[int, Message]) -> int:
    known = {each.id: each for each in computation.instructions}
    total = 0
    for each in computation.instructions:
        if each.opcode == "while":
            body, condition = (computations[number] for number in each.called_computation_ids)
            total += _trips(condition) * _of(body, computations)
        elif each.opcode in ("call", "fusion"):
            total += sum(
                _of(computations[number], computations) for number in each.called_computation_ids
            )
        elif each.opcode == "dot":
            total += _of_product(each, known)
        elif each.opcode not in _MOVES:
            total += _tiles(list(each.shape.dimensions))
    return total


def _of_product(each: Message, known: Mapping[int, Message]) -> int:
    left = known[each.operand_ids[0]].shape.dimensions
    summed = math.prod(left[axis] for axis in each.dot_dimension_numbers.lhs_contracting_dimensions)
    return _tiles(list(each.shape.dimensions)) * -(-summed // _ROWS)


def _tiles(dimensions: list[int]) -> int:
    """Tiles of an array: its last dimension in columns, the rest together in rows."""
    if not dimensions:
        return 1
    return -(-math.prod(dimensions[:-1]) // _ROWS) * -(-dimensions[-1] // _COLUMNS)


def _trips(condition: Message) -> int:
    """What a loop's counter is compared with; 1 where it is no constant."""
    known = {each.id: each for each in condition.instructions}
    root = known[condition.root_id]
    for number in root.operand_ids:
        literal = known[number].literal
        found = [*literal.s32s, *literal.s64s, *literal.u32s, *literal.u64s]
        if known[number].opcode == "constant" and found:
            return int(found[0])
    return 1
