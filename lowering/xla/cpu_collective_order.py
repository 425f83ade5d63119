"""Collectives of a CPU program in one order on every device, after it was stored and loaded.

XLA:CPU runs what is ready, in any order, but its collectives one after the other: all of a program
use one resource. When a program is loaded, what is in a loop or a call gets a resource of its own
(jaxlib 0.10 and 0.11). Then a collective beside a loop runs before those of the loop on one device,
after them on another, and both wait for ever: a step of a small Llama on two devices did, once in a
few hundred. Here the stored program gets its order back: a copy of no bytes between the two, which
for XLA reads what the first writes and writes what the second writes.

Source: thunk.proto and thunk_proto_serdes.cc in xla/backends/cpu/runtime, and
xla/runtime/execution_graph.cc
"""

import functools
import pickle
import pickletools
from itertools import pairwise
from typing import Any

from lowering.hlo.protobuf import classes

# What XLA stores. Fields that are not named stay as they are.
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


def keep_order(payload: bytes) -> bytes:
    """What JAX made of a CPU executable, with the order of its collectives in it.

    JAX pickles an executable as the bytes behind the string "exec", among shardings. Frames, whose
    lengths would change, are left out; a pickle needs none.
    """
    steps = list(pickletools.genops(payload))
    ends = [position for _, _, position in steps[1:]] + [len(payload)]
    parts, text = [], ""
    for (step, argument, begin), end in zip(steps, ends, strict=True):
        part = b"" if step.name == "FRAME" else payload[begin:end]
        if isinstance(argument, str):
            text = argument
        elif isinstance(argument, bytes) and text == "exec":
            ordered = order_executable(argument)
            part = pickle.BINBYTES8 + len(ordered).to_bytes(8, "little") + ordered
            text = ""
        parts.append(part)
    return b"".join(parts)


def order_executable(stored: bytes) -> bytes:
    """The same of an executable as IFRT stores it: a header's length, the header, XLA's program."""
    length, begin = 0, 0
    while True:
        byte = stored[begin]
        length |= (byte & 0x7F) << (7 * begin)
        begin += 1
        if byte < 0x80:
            break
    begin += length
    program = _messages()["Stored"].FromString(stored[begin:])
    if not _order(program.program.thunks):
        return stored
    return stored[:begin] + program.SerializeToString(deterministic=True)


def _order(sequence: Any) -> bool:
    """Order the collectives of a sequence and of those in it; whether anything was to be done."""
    changed = any([_order(inner) for thunk in sequence.thunks for inner in _inner(thunk)])
    communicating = [
        (index, array)
        for index, thunk in enumerate(sequence.thunks)
        if (array := _written(thunk)) is not None
    ]
    between = {
        later: _link(first, second)
        for (earlier, first), (later, second) in pairwise(communicating)
        if _inner(sequence.thunks[earlier]) or _inner(sequence.thunks[later])
    }
    if not between:
        return changed
    thunks, places = [], []
    for index, thunk in enumerate(sequence.thunks):
        if index in between:
            thunks.append(between[index])
        places.append(len(thunks))
        thunks.append(thunk)
    del sequence.thunks[:]
    sequence.thunks.extend(thunks)
    for users in sequence.users:
        users.indices[:] = [places[index] for index in users.indices]
    return True


def _inner(thunk: Any) -> list[Any]:
    """The sequences that a thunk runs."""
    if thunk.HasField("loop"):
        return [thunk.loop.condition, thunk.loop.body]
    if thunk.HasField("call"):
        return [thunk.call.sequence]
    return list(thunk.conditional.branches) if thunk.HasField("conditional") else []


def _written(thunk: Any) -> Any:
    """An array that a collective of this thunk, or of what it runs, writes; None without one."""
    if thunk.HasField("collective"):
        return thunk.collective.arrays.destinations[0]
    inner = (_written(each) for sequence in _inner(thunk) for each in sequence.thunks)
    return next((array for array in inner if array is not None), None)


def _link(first: Any, second: Any) -> Any:
    """A copy of no bytes that XLA runs after what writes the first array, before the second."""
    link = _messages()["Thunk"](kind="copy")
    for array, place in ((first, link.copy.source), (second, link.copy.destination)):
        place.slice = array.slice
        place.shape.element_type = _BYTE
        place.shape.dimensions.append(0)
        place.shape.layout.minor_to_major.append(0)
    return link
