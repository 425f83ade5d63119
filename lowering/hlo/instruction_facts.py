"""Facts of single instructions of a compiled program: what they send, and their kernels."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lowering.hlo.text import Instruction

_DIMENSION = re.compile(r"[ ,]dimensions=\{(\d+)\}")
# Custom calls that are annotations for the compiler and compute nothing.
_ANNOTATIONS = (
    "AllocateBuffer",
    "AssumeGatherIndicesInBound",
    "AsyncCollective",
    "MoveTo",
    "Sharding",
    "annotate_device_placement",
)


def sent_shapes(op: str, shapes: Sequence[str]) -> Sequence[str]:
    """Return the shapes of the operands that are sent.

    Some operations also have operands that only specify offsets or destination buffers. Several
    arrays permuted alike form one operation; offsets into an array are scalars.
    """
    is_in_place = any("[]" in shape or shape.startswith("(") for shape in shapes[1:])
    if op == "ragged-all-to-all" or (op == "collective-permute" and is_in_place):
        return shapes[:1]
    return shapes


def dimension_of(instruction: Instruction) -> int | None:
    """Return the dimension along which a collective splits or joins; None if it has none."""
    match = _DIMENSION.search(instruction.rest)
    return int(match[1]) if match else None


def kernel_of(instruction: Instruction) -> dict[str, int]:
    """Return {kernel name: 1} for a custom call that computes something, else {}."""
    target = instruction.attribute("custom_call_target") or ""
    name = target.strip('"')
    return {name: 1} if name and not name.startswith(_ANNOTATIONS) else {}
