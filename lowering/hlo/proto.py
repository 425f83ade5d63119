"""HloModuleProto: the binary form of an HLO program, which neuronx-cc reads.

The schema is built from a table, so neither generated code nor a copy of XLA's files is needed.
Names and numbers are those of xla/service/hlo.proto and xla/xla_data.proto. Enumerations are read
as integers. Fields that the table lacks remain in a message as unknown fields.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any

from google.protobuf import unknown_fields
from google.protobuf.message import DecodeError
from google.protobuf.message import Message as AnyMessage

from lowering.errors import LoweringError
from lowering.hlo.protobuf import classes
from lowering.hlo.schema import MESSAGES
from lowering.hlo.text import item_bits

Message = Any  # an instance of one of the classes below, which protobuf creates at run time

_PACKAGE = "graphtrain.hlo"  # unlike XLA's, to avoid conflicts with other copies of its schema

# XLA's PrimitiveType, by the type names of HLO text.
TYPES = {
    "pred": 1, "s4": 21, "s8": 2, "s16": 3, "s32": 4, "s64": 5, "u4": 22, "u8": 6, "u16": 7,
    "u32": 8, "u64": 9, "f16": 10, "f32": 11, "bf16": 16, "f64": 12, "f8e5m2": 19, "f8e4m3": 28,
    "f8e4m3fn": 20, "f8e4m3b11fnuz": 23, "f8e5m2fnuz": 24, "f8e4m3fnuz": 25, "f8e3m4": 29,
    "c64": 15, "c128": 18, "tuple": 13, "opaque": 14, "token": 17,
}  # fmt: skip
TYPE_NAMES = {number: name for name, number in TYPES.items()}


def make_message(name: str, **fields: Any) -> Message:
    """Create a message of the class `name`, for example a "ReplicaGroup" with replica_ids."""
    return _classes()[name](**fields)


def read_module(binary: bytes) -> Message:
    """Parse an HloModuleProto.

    Raises:
        LoweringError: the bytes are not an HloModuleProto.
    """
    module = make_message("HloModuleProto")
    if not (_parses(module, binary) and module.computations):
        raise LoweringError(
            f"these {len(binary):,} bytes are not an HloModuleProto; an HloProto (XLA's *.hlo.pb) "
            "contains the module in its field 1, and StableHLO is not supported"
        )
    return module


def read_dump(binary: bytes) -> Message:
    """Return the module in an HloProto, which XLA dumps as *.hlo.pb.

    Raises:
        LoweringError: the bytes are not an HloProto.
    """
    dump = make_message("HloProto")
    if not (_parses(dump, binary) and dump.hlo_module.computations):
        raise LoweringError(f"these {len(binary):,} bytes are not an HloProto")
    return dump.hlo_module


def write_module(module: Message) -> bytes:
    """Serialize a module; equal modules give equal bytes in every process."""
    return module.SerializeToString(deterministic=True)


def array_bytes(shape: Message) -> int:
    """Return the bytes of an array, without the padding of a device's layout."""
    return (math.prod(shape.dimensions) * item_bits(TYPE_NAMES[shape.element_type]) + 7) // 8


def unknown_fields_of(module: Message) -> Iterator[tuple[str, int]]:
    """Yield message name and number of every field, at any depth, that the table lacks."""
    name = module.DESCRIPTOR.name
    for field in unknown_fields.UnknownFieldSet(module):
        yield name, field.field_number
    for field, value in module.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for submessage in [value] if isinstance(value, AnyMessage) else value:
            yield from unknown_fields_of(submessage)


def _parses(into: Message, binary: bytes) -> bool:
    try:
        into.ParseFromString(binary)
    except DecodeError:
        return False
    return True


@functools.cache
def _classes() -> dict[str, Any]:
    return classes(_PACKAGE, MESSAGES, "proto3")
