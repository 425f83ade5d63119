"""HloModuleProto: the binary form of a program that neuronx-cc takes.

The schema is built here from a table, so no generated code and no copy of XLA's files is needed.
Names and numbers are those of xla/service/hlo.proto and xla/xla_data.proto. Enumerations are read
as their numbers. What the table lacks stays in a message as an unknown field.
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

Message = Any  # a message of one of the classes below; protobuf makes them when they are asked for

_PACKAGE = "graphtrain.hlo"  # our own, so that it meets no other copy of XLA's schema

# PrimitiveType of XLA, by the names that HLO text has for them.
TYPES = {
    "pred": 1, "s4": 21, "s8": 2, "s16": 3, "s32": 4, "s64": 5, "u4": 22, "u8": 6, "u16": 7,
    "u32": 8, "u64": 9, "f16": 10, "f32": 11, "bf16": 16, "f64": 12, "f8e5m2": 19, "f8e4m3": 28,
    "f8e4m3fn": 20, "f8e4m3b11fnuz": 23, "f8e5m2fnuz": 24, "f8e4m3fnuz": 25, "f8e3m4": 29,
    "c64": 15, "c128": 18, "tuple": 13, "opaque": 14, "token": 17,
}  # fmt: skip
TYPE_NAMES = {number: name for name, number in TYPES.items()}


def message(name: str, **fields: Any) -> Message:
    """A new message, as in message("ReplicaGroup", replica_ids=[0, 1])."""
    return _classes()[name](**fields)


def read_module(binary: bytes) -> Message:
    """Read an HloModuleProto.

    Raises:
        LoweringError: it is something else.
    """
    module = message("HloModuleProto")
    if not (_parses(module, binary) and module.computations):
        raise LoweringError(
            f"{len(binary):,} bytes that should be an HloModuleProto are not one; an HloProto "
            "(XLA's *.hlo.pb) holds the module in its field 1, and StableHLO is another language"
        )
    return module


def read_dump(binary: bytes) -> Message:
    """The module of an HloProto, which is what XLA dumps as *.hlo.pb.

    Raises:
        LoweringError: it is something else.
    """
    dump = message("HloProto")
    if not (_parses(dump, binary) and dump.hlo_module.computations):
        raise LoweringError(f"{len(binary):,} bytes that should be an HloProto are not one")
    return dump.hlo_module


def write_module(module: Message) -> bytes:
    """The bytes of a module; equal modules give equal bytes in every process."""
    return module.SerializeToString(deterministic=True)


def array_bytes(shape: Message) -> int:
    """Bytes of an array, without the padding of a device's layout."""
    return (math.prod(shape.dimensions) * item_bits(TYPE_NAMES[shape.element_type]) + 7) // 8


def unknown(module: Message) -> Iterator[tuple[str, int]]:
    """Message and number of every field, at any depth, that the table does not name."""
    name = module.DESCRIPTOR.name
    for field in unknown_fields.UnknownFieldSet(module):
        yield name, field.field_number
    for field, value in module.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for part in [value] if isinstance(value, AnyMessage) else value:
            yield from unknown(part)


def _parses(into: Message, binary: bytes) -> bool:
    try:
        into.ParseFromString(binary)
    except DecodeError:
        return False
    return True


@functools.cache
def _classes() -> dict[str, Any]:
    return classes(_PACKAGE, MESSAGES, "proto3")
