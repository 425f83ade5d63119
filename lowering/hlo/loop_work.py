"""Work of a loop over elements: a fusion, a copy, a reduction of a compiled CPU program."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from lowering.hlo.element_order import dimensions, kind_of_move, minor
from lowering.hlo.text import Computation, HloModule, Instruction, arrays, item_bits, nbytes

_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "reshape", "broadcast",
    "iota", "slice", "dynamic-slice", "opt-barrier",
}  # fmt: skip
# Functions of one element that take longer than arithmetic, by the name that a profile has.
FUNCTIONS = {
    "exponential": "exp",
    "exponential-minus-one": "exp",
    "log": "log",
    "log-plus-one": "log",
    "tanh": "tanh",
    "erf": "erf",
    "logistic": "logistic",
    "rsqrt": "rsqrt",
    "sqrt": "sqrt",
    "sine": "sine",
    "cosine": "sine",
    "power": "power",
    "divide": "divide",
    "remainder": "divide",
    "sort": "sort",
    "gather": "gather",
    "scatter": "scatter",
    "concatenate": "concatenate",
    "pad": "concatenate",
    "rng-bit-generator": "random",
}
# Calls of LAPACK that profiles have. Others are of a kind that nothing measures.
_LAPACK = re.compile(r'custom_call_target="lapack_[sdcz](\w+?)_ffi"')
FACTORIZATIONS = {"geqrf": "qr", "orgqr": "qr", "syevd": "eigh"}
UNMEASURED = "LAPACK's "
_REDUCTIONS = ("reduce", "reduce-window")
_SLICES = ("dynamic-slice", "slice", "gather")
# What a loop contains that only transposes.
_TRANSPOSITION = {"parameter", "bitcast", "copy", "reshape", "transpose"}
# Kinds of moves, the one that takes longest first.
_MOVES = ("transposed_aliased", "transposed", "permuted")


@dataclass(frozen=True)
class LoopWork:
    """One execution of a kernel that is no product."""

    bytes: int  # that it reads and writes
    elements: tuple[tuple[str, int], ...]  # computed elements by kind: arithmetic, exp, reduce, ...
    partitions: int  # threads among which it is divided

    def to_record(self) -> dict[str, Any]:
        """Return the fields as JSON."""
        return {**vars(self), "elements": dict(self.elements)}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> LoopWork:
        """Return the work that a compiled program's record contains."""
        elements = tuple(record["elements"].items())
        return cls(record["bytes"], elements, record["partitions"])


def rounding_reducers(module: HloModule) -> frozenset[str]:
    """Return the reducers that round every partial sum to bfloat16, which XLA:CPU computes slowly.

    Each is a computation of scalars with a conversion, by its name.
    """
    return frozenset(
        name
        for name, one in module.computations.items()
        if all(_count(each.shape) == 1 for each in one.instructions.values())
        and any(_narrows(each) for each in one.instructions.values())
    )


def plain_work(
    computation: Computation,
    instruction: Instruction,
    partitions: int,
    rounding: Collection[str] = (),
) -> LoopWork:
    """Return the work of an instruction outside of fusions; `rounding` as for fused_work()."""
    moved = nbytes(instruction.shape) + sum(map(nbytes, computation.operand_shapes(instruction)))
    elements: Counter[str] = Counter()
    if kind := _kind(computation, instruction, rounding):
        elements[kind] += _computed(computation, instruction)
    return LoopWork(moved, _sorted(elements), partitions)


def fused_work(fused: Computation, partitions: int, rounding: Collection[str] = ()) -> LoopWork:
    """Return the work of a fusion: each element of its instructions is computed once.

    An operand of which a loop reads slices counts with these alone, and an array that is updated
    in place counts with the update.

    Args:
        fused: The computation of the fusion.
        partitions: Threads among which it is divided.
        rounding: Reducers that round, from rounding_reducers().
    """
    results, in_place = _results(fused)
    users = _users(fused)
    reductions = [one for one in fused.instructions.values() if one.opcode in _REDUCTIONS]
    counts = sum(map(_count, results)), *(_computed(fused, one) for one in reductions)
    elements: Counter[str] = Counter()
    moved = sum(map(nbytes, results))
    for one in fused.instructions.values():
        if one.opcode == "parameter":
            moved += _bytes_read(one, one, users, in_place)
        elif one.name not in in_place and (kind := _kind(fused, one, rounding)):
            elements[kind] += min(_computed(fused, one), max(counts))
    return LoopWork(moved, _sorted(_moved_once(elements, fused)), partitions)


def _moved_once(elements: Counter[str], fused: Computation) -> Counter[str]:
    """Return elements in which a transposition that takes two instructions counts once.

    A transposition alone is faster than one whose loop also slices or converts.
    """
    moves = {kind: elements.pop(kind) for kind in _MOVES if kind in elements}
    if moves:
        kind = next(kind for kind in _MOVES if kind in moves)
        opcodes = {one.opcode for one in fused.instructions.values()}
        is_alone = kind != "permuted" and opcodes <= _TRANSPOSITION
        elements["transposed_alone" if is_alone else kind] += max(moves.values())
    return elements


def _results(fused: Computation) -> tuple[list[str], set[str]]:
    """Return the shapes that a fusion writes, and the names of what it updates in place."""
    root = fused.instructions[fused.root]
    names = root.operands if root.opcode == "tuple" else [root.name]
    shapes: list[str] = []
    in_place: set[str] = set()
    for name in names:
        path = _path_to_update(fused, name)
        if path is None:
            shapes.append(fused.instructions[name].shape)
            continue
        update = fused.instructions[fused.instructions[path[-1]].operands[1]].shape
        dtype, _ = arrays(fused.instructions[name].shape)[0]
        shapes.append(f"{dtype}[{','.join(map(str, arrays(update)[0][1]))}]")
        in_place |= {*path, *_origins(fused, fused.instructions[path[-1]].operands[0])}
    return shapes, in_place


def _path_to_update(fused: Computation, name: str) -> list[str] | None:
    """Return the instructions from a result to the update in place that it is; else None.

    XLA:CPU updates only parameters in place. In bfloat16, which it converts to float32 and back
    around a dynamic-update-slice, its loop writes the whole array again.
    """
    path = _origins(fused, name)
    update = fused.instructions[path[-1]]
    if update.opcode != "dynamic-update-slice":
        return None
    updated = fused.instructions[_origins(fused, update.operands[0])[-1]]
    return path if updated.opcode == "parameter" else None


def _origins(fused: Computation, name: str) -> list[str]:
    """Return an instruction and what it is, up to the first that is no other name for its array."""
    path = [name]
    while (one := fused.instructions[path[-1]]).opcode == "bitcast":
        path.append(one.operands[0])
    return path


def _users(fused: Computation) -> Mapping[str, list[tuple[Instruction, int]]]:
    """Return the users of each instruction, with the index of the operand."""
    users: dict[str, list[tuple[Instruction, int]]] = defaultdict(list)
    for one in fused.instructions.values():
        for index, operand in enumerate(one.operands):
            users[operand].append((one, index))
    return users


def _bytes_read(
    parameter: Instruction,
    value: Instruction,
    users: Mapping[str, list[tuple[Instruction, int]]],
    in_place: set[str],
) -> int:
    """Return the bytes of a parameter that are read through a value that it is."""
    read = 0 if users[value.name] else nbytes(parameter.shape)  # the result
    for user, index in users[value.name]:
        if user.opcode in _SLICES and index == 0:
            read += _count(user.shape) * _item_bytes(parameter.shape)
        elif user.opcode == "dynamic-update-slice" and index == 0 and user.name in in_place:
            continue
        elif user.opcode in ("bitcast", "convert"):
            read += _bytes_read(parameter, user, users, in_place)
        else:
            read += nbytes(parameter.shape)
    return min(read, nbytes(parameter.shape))


def _kind(computation: Computation, one: Instruction, rounding: Collection[str] = ()) -> str | None:
    """Return the kind of an instruction's work, by which a profile has its seconds; None: free."""
    opcode = one.opcode
    if opcode in FUNCTIONS:
        return FUNCTIONS[opcode]
    if opcode == "broadcast" and _repeats_bfloat16(one):
        return "repeat_bfloat16"
    if opcode in _FREE:
        return None
    if _narrows(one):
        return "to_bfloat16"
    if opcode == "convert":
        return None
    if opcode in ("copy", "transpose"):
        return kind_of_move(computation, one)
    if opcode in _REDUCTIONS:
        return "reduce_bfloat16" if one.attribute("to_apply") in rounding else "reduce"
    if lapack := _lapack_routine(one):
        return FACTORIZATIONS.get(lapack, UNMEASURED + lapack)
    return "arithmetic"


def _narrows(one: Instruction) -> bool:
    if one.opcode == "reduce-precision":
        return "mantissa_bits=7" in one.rest
    return one.opcode == "convert" and arrays(one.shape)[0][0] == "bf16"


def _repeats_bfloat16(broadcast: Instruction) -> bool:
    """Return true if neighbours in a bfloat16 result are one value; XLA:CPU stores each alone."""
    neighbours = minor(broadcast.shape)
    if neighbours is None or arrays(broadcast.shape)[0][0] != "bf16":
        return False
    return neighbours not in (dimensions(broadcast) or ())


def _lapack_routine(one: Instruction) -> str | None:
    """Return the routine of LAPACK that an instruction calls, without the letter of its dtype."""
    called = _LAPACK.search(one.rest) if one.opcode == "custom-call" else None
    return called and called[1]


def _computed(computation: Computation, one: Instruction) -> int:
    """Return the number of elements that an instruction computes; of a reduction, that it reads.

    Of a factorization, the elements of its matrices, times the smaller of their sizes.
    """
    shapes = computation.operand_shapes(one)
    if _lapack_routine(one) and shapes:
        return _count(shapes[0]) * min(arrays(shapes[0])[0][1][-2:])
    if one.opcode in _REDUCTIONS and shapes:
        return _count(shapes[0])
    if one.opcode == "sort":
        size = _count(shapes[0]) if shapes else 0
        return round(size * math.log2(max(2, size)))
    if one.opcode == "scatter" and shapes:
        return _count(shapes[-1])  # the updates
    return _count(one.shape)


def _count(shape: str) -> int:
    return sum(math.prod(sizes) for _, sizes in arrays(shape))


def _item_bytes(shape: str) -> int:
    return max(1, item_bits(arrays(shape)[0][0]) // 8)


def _sorted(elements: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(elements.items()))
