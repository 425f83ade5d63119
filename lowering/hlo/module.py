"""HLO modules written by other programs: inputs, outputs, donation and a stable digest."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from lowering.hlo.proto import TYPE_NAMES, TYPES, Message, read_dump, write_module
from sharding_rules.arrays import ArraySpec

# HLO dtype names that do not follow the pattern of s64 -> int64.
_DTYPES = {"pred": "bool", "bf16": "bfloat16", "c64": "complex64", "c128": "complex128"}
_KINDS = {"s": "int", "u": "uint", "f": "float"}
_FLOAT8 = "f8e"
# A replicated OpSharding, with its type 0 written explicitly: an empty message would be omitted.
_REPLICATED = b"\x08\x00"


@dataclass(frozen=True)
class Input:
    """One input array of a module."""

    spec: ArraySpec
    sharding: bytes  # serialized xla.OpSharding; empty if the array is replicated


@dataclass(frozen=True)
class HloModule:
    """An HLO module without source locations and process-specific ids."""

    message: Message

    @classmethod
    def read(cls, binary: bytes) -> "HloModule":
        """Read an HloProto, the format of XLA's *.hlo.pb dumps.

        Raises:
            LoweringError: `binary` is not an HloProto.
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
        """Serialized HloModuleProto; equal for equal programs, in every process."""
        return write_module(self.message)

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.binary).hexdigest()

    @property
    def instructions(self) -> int:
        """Number of instructions in the module, not counting repeated execution."""
        return sum(len(each.instructions) for each in self.message.computations)

    @property
    def inputs(self) -> list[Input]:
        """Input arrays, in order."""
        entry_id = self.message.entry_computation_id
        entry = next(each for each in self.message.computations if each.id == entry_id)
        parameters = [each for each in entry.instructions if each.opcode == "parameter"]
        return [
            Input(_spec(each.shape), each.sharding)
            for each in sorted(parameters, key=lambda each: each.parameter_number)
        ]

    @property
    def outputs(self) -> list[ArraySpec]:
        """Output arrays, in order."""
        result = self.message.host_program_shape.result
        is_tuple = result.element_type == TYPES["tuple"]
        shapes: Sequence[Message] = result.tuple_shapes if is_tuple else [result]
        return [_spec(shape) for shape in shapes]

    @property
    def donated(self) -> tuple[int, ...]:
        """Indices of the inputs whose buffers the outputs may reuse."""
        aliased = self.message.input_output_alias.entries
        donations = [*aliased, *self.message.buffer_donor.entries]
        return tuple(sorted({each.parameter_number for each in donations}))


def _spec(shape: Message) -> ArraySpec:
    sizes = tuple(shape.dimensions)
    return ArraySpec(sizes, (None,) * len(sizes), _dtype(TYPE_NAMES[shape.element_type]))


def _dtype(name: str) -> str:
    """Return JAX's name of an HLO dtype: float32 for f32, float8_e4m3fn for f8e4m3fn."""
    if name.startswith(_FLOAT8):
        return f"float8_{name.removeprefix('f8')}"
    return _DTYPES.get(name) or f"{_KINDS[name[0]]}{name[1:]}"
