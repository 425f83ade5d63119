"""Restore the order of collectives in a serialized XLA:CPU program, the same on every device.

XLA:CPU runs instructions in any order once their inputs are ready, but serializes the collectives
of a program through one shared resource. When a program is deserialized, each loop and call gets a
resource of its own (jaxlib 0.10 and 0.11). A collective next to a loop may then run before those of
the loop on one device and after them on another, which deadlocks both (about one in several hundred
steps of a small Llama on two devices). This module adds a zero-byte copy between the two to the
serialized program. XLA sees a copy that reads what the first writes and writes what the second
writes.

Source: thunk.proto and thunk_proto_serdes.cc in xla/backends/cpu/runtime, and
xla/runtime/execution_graph.cc
"""

import functools
from itertools import pairwise
from typing import Any

from lowering.hlo.protobuf import classes
from lowering.xla import private

# Fields of XLA's serialized program that are read or changed. All others are preserved.
_FIELDS = {
    "Stored": {"program": (1, "Program")},
    "Program": {"thunks": (6, "Sequence")},
    "Sequence": {"thunks": (1, "[Thunk]"), "users": (2, "[Users]")},
    "Users": {"indices": (1, "[int64]")},
    "Thunk": {
        "kind": (1, "string"),
        "call": (3, "Call"),
        "conditional": (4, "Conditional"),
        "loop": (10, "Loop"),
        "copy": (12, "Copy"),
        "collective": (18, "Collective"),
    },
    "Call": {"sequence": (1, "Sequence")},
    "Conditional": {"branches": (1, "[Sequence]")},
    "Loop": {"condition": (1, "Sequence"), "body": (2, "Sequence")},
    "Copy": {"source": (1, "Array"), "destination": (2, "Array")},
    "Collective": {"arrays": (2, "Arrays")},
    "Arrays": {"sources": (1, "[Array]"), "destinations": (2, "[Array]")},
    "Array": {"shape": (1, "Shape"), "slice": (2, "bytes")},
    "Shape": {"element_type": (2, "int32"), "dimensions": (3, "[int64]"), "layout": (5, "Layout")},
    "Layout": {"minor_to_major": (1, "[int64]")},
}
_BYTE = 6  # U8 of xla.PrimitiveType


@functools.cache
def _messages() -> dict[str, Any]:
    return classes("graphtrain.cpu_program", _FIELDS, "proto3")


def serialize_collective_order(payload: bytes) -> bytes:
    """Return a CPU executable serialized by JAX, with the order of its collectives fixed."""
    return private.change_pickled_executable(payload, serialize_executable_order)


def serialize_executable_order(stored: bytes) -> bytes:
    """Fix the order of collectives in an executable in IFRT's format."""
    header, stored_program = private.split_executable(stored)
    program = _messages()["Stored"].FromString(stored_program)
    if not _order(program.program.thunks):
        return stored
    return header + program.SerializeToString(deterministic=True)


def _order(sequence: Any) -> bool:
    """Order the collectives of a sequence and its nested ones; return whether it was changed."""
    changed = any([_order(inner) for thunk in sequence.thunks for inner in _inner(thunk)])
    communicating = [
        (index, array)
        for index, thunk in enumerate(sequence.thunks)
        if (array := _collective_output(thunk)) is not None
    ]
    between = {
        later: _order_copy(first, second)
        for (earlier, first), (later, second) in pairwise(communicating)
        if _inner(sequence.thunks[earlier]) or _inner(sequence.thunks[later])
    }
    if not between:
        return changed
    thunks, new_indices = [], []
    for index, thunk in enumerate(sequence.thunks):
        if index in between:
            thunks.append(between[index])
        new_indices.append(len(thunks))
        thunks.append(thunk)
    del sequence.thunks[:]
    sequence.thunks.extend(thunks)
    for users in sequence.users:
        users.indices[:] = [new_indices[index] for index in users.indices]
    return True


def _inner(thunk: Any) -> list[Any]:
    """Return the sequences that a thunk contains."""
    if thunk.HasField("loop"):
        return [thunk.loop.condition, thunk.loop.body]
    if thunk.HasField("call"):
        return [thunk.call.sequence]
    return list(thunk.conditional.branches) if thunk.HasField("conditional") else []


def _collective_output(thunk: Any) -> Any:
    """Return an array written by a collective in this thunk, nested ones included; None if none."""
    if thunk.HasField("collective"):
        return thunk.collective.arrays.destinations[0]
    inner = (_collective_output(thunk) for sequence in _inner(thunk) for thunk in sequence.thunks)
    return next((array for array in inner if array is not None), None)


def _order_copy(first: Any, second: Any) -> Any:
    """Return a zero-byte copy: XLA runs it after the first array's writer, before the second's."""
    link = _messages()["Thunk"](kind="copy")
    for array, buffer in ((first, link.copy.source), (second, link.copy.destination)):
        buffer.slice = array.slice
        buffer.shape.element_type = _BYTE
        buffer.shape.dimensions.append(0)
        buffer.shape.layout.minor_to_major.append(0)
    return link
