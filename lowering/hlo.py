"""The text of an optimized HLO module as computations of instructions.

Only what a reader of collectives and memory needs. The grammar is what XLA prints in jax 0.10 and
0.11: https://openxla.org/xla/hlo_dumps
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

_ITEM_BITS = {"pred": 8, "token": 0, "opaque": 0}
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_NAME = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) ")
_CALLED = re.compile(
    r"(?:calls|to_apply|true_computation|false_computation|called_computations)=\{?%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    shape: str  # as printed; a tuple in parentheses
    text: str  # from the operands on

    def attribute(self, name: str) -> str | None:
        """The name of a computation that the instruction refers to, as in body=%region."""
        found = re.search(rf"\b{name}=%?([\w.\-]+)", self.text)
        return found[1] if found else None

    @property
    def operands(self) -> list[str]:
        """Names of the instructions whose results it takes."""
        return re.findall(r"%([\w.\-]+)", self.text.partition(")")[0])

    @property
    def called(self) -> list[str]:
        """Computations it runs once, where it is run once."""
        names = _CALLED.findall(self.text)
        if branches := _BRANCHES.search(self.text):
            names += [name.strip().lstrip("%") for name in branches[1].split(",")]
        return names

    @property
    def scope(self) -> str:
        """Names around the operation in the traced program, outermost first."""
        found = re.search(r'op_name="([^"]*)"', self.text)
        return found[1] if found else ""


@dataclass(frozen=True)
class Module:
    """Computations by name, and where their instructions come from."""

    computations: dict[str, list[Instruction]]
    entry: str
    tables: dict[str, dict[int, str]] = field(default_factory=dict)

    def frames(self, instruction: Instruction) -> list[tuple[str, str, int]]:
        """(file, function, line) of the Python calls that made an instruction, innermost first."""
        found = re.search(r"stack_frame_id=(\d+)", instruction.text)
        frames, identity = [], int(found[1]) if found else 0
        while identity:
            frame = _numbers(self.tables["StackFrames"].get(identity, ""))
            place = _numbers(self.tables["FileLocations"].get(frame.get("file_location_id", 0), ""))
            if not place:
                break
            file = self.tables["FileNames"][place["file_name_id"]]
            function = self.tables["FunctionNames"][place["function_name_id"]]
            frames.append((file.strip('"'), function.strip('"'), place["line"]))
            parent = frame.get("parent_frame_id", 0)
            identity = 0 if parent == identity else parent
        return frames


def parse(text: str) -> Module:
    """Read the text of a compiled module.

    Raises:
        ValueError: it has no entry computation.
    """
    computations: dict[str, list[Instruction]] = {}
    tables: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
    entry, inside, table = "", None, None
    for line in text.splitlines():
        if line in tables:
            table = tables[line]
        elif line and line[0].isdigit() and table is not None:
            number, _, rest = line.partition(" ")
            table[int(number)] = rest
        elif line and line[0] != " " and line.endswith("{") and (start := _COMPUTATION.match(line)):
            inside, table = computations.setdefault(start[2], []), None
            entry = start[2] if start[1] else entry
        elif inside is not None and (instruction := _instruction(line)):
            inside.append(instruction)
    if not entry:
        raise ValueError("the text is no optimized HLO module: it has no ENTRY computation")
    return Module(computations, entry, tables)


def _instruction(line: str) -> Instruction | None:
    named = _NAME.match(line)
    if not named:
        return None
    start = named.end()
    end = _closing(line, start) if line[start] == "(" else line.find(" ", start)
    opcode = _OPCODE.match(line, end)
    if not opcode:
        return None
    return Instruction(named[1], opcode[1], line[start:end], line[opcode.end() :])


def _closing(line: str, start: int) -> int:
    """Position after the parenthesis that closes the one at start."""
    depth = 0
    for position in range(start, len(line)):
        depth += {"(": 1, ")": -1}.get(line[position], 0)
        if depth == 0:
            return position + 1
    return len(line)


def _numbers(text: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", text)}


def arrays_of(shape: str) -> list[tuple[str, int]]:
    """Type and bytes of every array of a shape as printed, tuples flattened."""
    return [
        (dtype, math.prod(int(size) for size in sizes.split(",") if size) * _bits(dtype) // 8)
        for dtype, sizes in _SHAPE.findall(shape)
    ]


def _bits(dtype: str) -> int:
    if dtype in _ITEM_BITS:
        return _ITEM_BITS[dtype]
    digits = re.match(r"[a-z]+(\d+)", dtype)
    return int(digits[1]) if digits else 0
