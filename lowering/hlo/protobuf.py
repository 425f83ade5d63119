"""Protocol buffer classes from a table of fields, without generated code or copied schemas.

A table maps messages to their fields: number and type, where "[int64]" is repeated and "{string}"
is a map from strings. Enumerations are declared as int32, and messages that are not inspected as
bytes; the wire format is the same.
"""

from collections.abc import Mapping
from typing import Any, Literal

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

Table = Mapping[str, Mapping[str, tuple[int, str]]]

_Field = descriptor_pb2.FieldDescriptorProto


def classes(package: str, table: Table, syntax: Literal["proto2", "proto3"]) -> dict[str, Any]:
    """Return the classes of a table's messages, by name.

    Args:
        package: a unique name, to avoid conflicts with other copies of the same schema.
        table: fields of each message.
        syntax: proto3 omits zero values when it serializes.
    """
    file = descriptor_pb2.FileDescriptorProto(
        name=f"{package.replace('.', '/')}.proto", package=package
    )
    if syntax == "proto3":
        file.syntax = syntax
    for name, fields in table.items():
        message = file.message_type.add(name=name)
        for field, (field_number, kind) in fields.items():
            _add(message, field, field_number, kind, package, table)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)  # type: ignore[attr-defined]
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}"))
        for name in table
    }


def _add(message: Any, name: str, field_number: int, kind: str, package: str, table: Table) -> None:
    is_repeated = kind[0] in "[{"
    field = message.field.add(
        name=name,
        number=field_number,
        label=_Field.LABEL_REPEATED if is_repeated else _Field.LABEL_OPTIONAL,
    )
    if kind.startswith("{"):
        entry = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
        entry.options.map_entry = True
        _add(entry, "key", 1, "string", package, table)
        _add(entry, "value", 2, kind[1:-1], package, table)
        field.type = _Field.TYPE_MESSAGE
        field.type_name = f".{package}.{message.name}.{entry.name}"
        return
    element = kind.strip("[]")
    if element in table:
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".{package}.{element}"
    else:
        field.type = _Field.Type.Value(f"TYPE_{element.upper()}")
