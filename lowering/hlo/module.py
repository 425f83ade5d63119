"""HLO modules that other programs have written: what they take, and what makes them equal."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from lowering.hlo.proto import TYPE_NAMES, TYPES, Message, read_dump, write_module
from sharding_rules.arrays import ArraySpec

# HLO's names of what JAX calls otherwise; the others are as s64, which is int64.
_DTYPES = {"pred": "bool", "bf16": "bfloat16", "c64": "complex64", "c128": "complex128"}
_KINDS = {"s": "int", "u": "uint", "f": "float"}
_FLOAT8 = "f8e"
# An OpSharding whose type is written though it is 0: as an empty one it would be left out.
_REPLICATED = b"\x08\x00"


@dataclass(frozen=True)
class Input:
    """One array that a module takes."""

    spec: ArraySpec
    sharding: bytes  # an OpSharding of XLA's; empty where the array is whole on each device


@dataclass(frozen=True)
class HloModule:
    """A whole program, without the lines of Python that made it."""

    message: Message

    @classmethod
    def read(cls, binary: bytes) -> "HloModule":
        """Read an HloProto, which is what XLA dumps as *.hlo.pb.

        Raises:
            LoweringError: it is something else.
        """
        module = read_dump(binary)
        for computation in module.computations:
            for instruction in computation.instructions:
                instruction.ClearField("metadata")
                if instruction.custom_call_target == "Sharding" and not instruction.sharding:
                    instruction.sharding = _REPLICATED
        for field in ("id", "stack_frame_index", "device_assignment"):
            module.ClearField(field)
        return cls(module)

    @cached_property
    def binary(self) -> bytes:
        """An HloModuleProto; of equal programs equal, in every process."""
        return write_module(self.message)

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.binary).hexdigest()

    @property
    def instructions(self) -> int:
        """How many there are, each counted once."""
        return sum(len(each.instructions) for each in self.message.computations)

    @property
    def inputs(self) -> list[Input]:
        """In their order."""
        entry_id = self.message.entry_computation_id
        entry = next(each for each in self.message.computations if each.id == entry_id)
        found = [each for each in entry.instructions if each.opcode == "parameter"]
        return [
            Input(_spec(each.shape), each.sharding)
            for each in sorted(found, key=lambda each: each.parameter_number)
        ]

    @property
    def outputs(self) -> list[ArraySpec]:
        """In their order."""
        result = self.message.host_program_shape.result
        is_tuple = result.element_type == TYPES["tuple"]
        shapes: Sequence[Message] = result.tuple_shapes if is_tuple else [result]
        return [_spec(shape) for shape in shapes]

    @property
    def donated(self) -> tuple[int, ...]:
        """Numbers of the inputs whose memory the outputs may take."""
        aliased = self.message.input_output_alias.entries
        given = [*aliased, *self.message.buffer_donor.entries]
        return tuple(sorted({each.parameter_number for each in given}))


def _spec(shape: Message) -> ArraySpec:
    sizes = tuple(shape.dimensions)
    return ArraySpec(sizes, (None,) * len(sizes), _dtype(TYPE_NAMES[shape.element_type]))


def _dtype(name: str) -> str:
    """JAX's name of a type of HLO: float32 of f32, float8_e4m3fn of f8e4m3fn."""
    if name.startswith(_FLOAT8):
        return f"float8_{name.removeprefix('f8')}"
    return _DTYPES.get(name) or f"{_KINDS[name[0]]}{name[1:]}"
