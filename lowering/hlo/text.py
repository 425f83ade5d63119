"""Parser of HLO text: an optimized program as computations of instructions.

Text is the only form that the compiler plugins of all backends return.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

_HEADER = re.compile(r"(ENTRY )?%(\S+) \(")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%(\S+) = (.*?) ?([a-z][\w-]*)\(")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_NAME = re.compile(r"%([^\s,(){}]+)")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_FRAME_ID = re.compile(r"stack_frame_id=(\d+)")
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_BITS = {"pred": 8, "token": 0, "opaque": 0}
_DIGITS = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    shape: str  # of the result, as in "bf16[8,64]{1,0}" or "(f32[], s32[2])"
    arguments: str  # between the parentheses: operands, or a literal
    rest: str  # attributes, metadata and backend_config

    @property
    def operands(self) -> list[str]:
        """Names of its operands, which are instructions of the same computation."""
        return _NAME.findall(self.arguments)

    def attribute(self, name: str) -> str | None:
        """Return the value after "name=", up to a comma or space, without a leading %."""
        match = re.search(rf"[ ,{{]{name}=%?([^\s,}}]+)", self.rest)
        return match and match[1]

    def computations(self, attribute: str) -> list[str]:
        """Return the computations named by an attribute that lists several in braces."""
        match = re.search(rf"{attribute}=\{{([^}}]*)\}}", self.rest)
        return _NAME.findall(match[1]) if match else []

    @property
    def op_name(self) -> str:
        """JAX name stack of the operation; empty if the compiler created the operation."""
        match = _OP_NAME.search(self.rest)
        return match[1].replace("\\'", "'") if match else ""

    @property
    def frame(self) -> int:
        """Id, in Module.frames, of the stack frame that traced the operation; 0 for none."""
        match = _FRAME_ID.search(self.rest)
        return int(match[1]) if match else 0


@dataclass(frozen=True, slots=True)
class Computation:
    """A computation of a program: a loop's body, a fusion, a reducer, or the entry."""

    name: str
    instructions: Mapping[str, Instruction]  # in the order of the text
    root: str

    def operand_shapes(self, instruction: Instruction) -> list[str]:
        return [
            self.instructions[name].shape
            for name in instruction.operands
            if name in self.instructions
        ]


@dataclass(frozen=True)
class Frame:
    """A line of Python that was executing when an operation was traced."""

    file: str
    line: int
    parent: int  # id of the calling frame; 0 for none


@dataclass(frozen=True)
class HloModule:
    """A parsed HLO module."""

    computations: Mapping[str, Computation]
    entry: str
    frames: Mapping[int, Frame]

    def stack(self, frame: int) -> list[Frame]:
        """Return the frame and its callers, innermost first."""
        frames = []
        while frame in self.frames:
            frames.append(self.frames[frame])
            frame = self.frames[frame].parent
        return frames


def parse(text: str) -> HloModule:
    """Parse the text of a compiled program, in time linear in its length."""
    computations: dict[str, Computation] = {}
    tables: dict[str, list[str]] = {name: [] for name in _TABLES}
    entry, table = "", None
    name, root, instructions = "", "", {}
    for line in text.splitlines():
        if line.startswith("  "):
            is_root, instruction = _instruction(line)
            if instruction is not None:
                instructions[instruction.name] = instruction
                root = instruction.name if is_root else root
        elif line.startswith("}"):
            computations[name] = Computation(name, instructions, root)
        elif header := _HEADER.match(line):
            name, root, instructions = header[2], "", {}
            entry = name if header[1] else entry
        elif line in tables:
            table = line
        elif table and line:
            tables[table].append(line)
        else:
            table = None
    return HloModule(computations, entry, _frames(tables))


def _instruction(line: str) -> tuple[bool, Instruction | None]:
    match = _INSTRUCTION.match(line)
    if match is None:
        return False, None
    begin = match.end()
    end = line.find(")", begin)
    if match[4] == "constant":  # only a literal can contain parentheses
        end = max(end, line.find("), ", begin), begin)
    return bool(match[1]), Instruction(
        match[2], match[4], match[3], line[begin:end], line[end + 1 :]
    )


def _frames(tables: Mapping[str, list[str]]) -> dict[int, Frame]:
    """Join the tables of file names, locations and stack frames into frames by id."""

    def parse_fields(line: str) -> dict[str, int]:
        return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", line)}

    def parse_rows(name: str) -> dict[int, str]:
        split = (line.partition(" ") for line in tables[name])
        return {int(entry_id): row for entry_id, _, row in split}

    files = {entry_id: row.strip('"') for entry_id, row in parse_rows("FileNames").items()}
    locations = {
        entry_id: parse_fields(row) for entry_id, row in parse_rows("FileLocations").items()
    }
    frames = {}
    for entry_id, row in parse_rows("StackFrames").items():
        fields = parse_fields(row)
        location = locations[fields["file_location_id"]]
        # parent_frame_id is the parent's frame id plus 1: a value of 1 means no parent.
        parent = fields.get("parent_frame_id", 1) - 1
        frames[entry_id] = Frame(files[location["file_name_id"]], location["line"], parent)
    return frames


@functools.lru_cache(maxsize=65536)
def arrays(shape: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return dtype and dimension sizes of every array in a shape, including nested tuples."""
    return tuple(
        (dtype, tuple(int(size) for size in sizes.split(",") if size))
        for dtype, sizes in _ARRAY.findall(shape)
    )


def nbytes(shape: str) -> int:
    """Return the bytes of all arrays in a shape, without the padding of a device layout."""
    bits = (item_bits(dtype) * math.prod(sizes) for dtype, sizes in arrays(shape))
    return sum((each + 7) // 8 for each in bits)


@functools.cache
def item_bits(dtype: str) -> int:
    """Return the bits of one element of an HLO dtype, for example bf16, s4, f8e4m3fn or pred."""
    if dtype in _BITS:
        return _BITS[dtype]
    digits = _DIGITS.search(dtype)
    return int(digits[0]) if digits else 0
