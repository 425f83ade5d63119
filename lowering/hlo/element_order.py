"""Order of elements in memory, and how copies and transpositions change it."""

from __future__ import annotations

import re

from lowering.hlo.text import Computation, Instruction, arrays

_LAYOUT = re.compile(r"\{([\d,]+)[^}]*\}")
_DIMENSIONS = re.compile(r"dimensions=\{([\d,]*)\}")
_ALIASED = 256  # elements: rows this far apart, or a multiple, share few sets of the first cache


def kind_of_move(computation: Computation, one: Instruction) -> str | None:
    """Return how an instruction moves elements; None if it keeps their order.

    "transposed": neighbours in the result are none in the operand. "permuted": runs of neighbours
    are in another order.
    """
    shapes = computation.operand_shapes(one)
    if not shapes:
        return None
    source_minor, order = minor(shapes[0]), _order(one)
    if source_minor is None or not order:
        return None
    if order[0] == source_minor:
        return None if order == _layout(shapes[0]) else "permuted"
    _, sizes = arrays(shapes[0])[0]
    return "transposed" if sizes[source_minor] % _ALIASED else "transposed_aliased"


def minor(shape: str) -> int | None:
    """Return the dimension whose elements are neighbours in memory; None of a scalar."""
    layout = _layout(shape)
    return layout[0] if layout else None


def dimensions(one: Instruction) -> list[int] | None:
    """Return the attribute `dimensions` of a transpose or broadcast; None if it has none."""
    found = _DIMENSIONS.search(one.rest)
    return found and [int(index) for index in found[1].split(",") if index]


def _order(one: Instruction) -> list[int]:
    """Return the operand's dimensions in the order of the result's memory, fastest first."""
    order = _layout(one.shape)
    if one.opcode == "transpose" and (permutation := dimensions(one)):
        return [permutation[index] for index in order]
    return order


def _layout(shape: str) -> list[int]:
    found = _LAYOUT.search(shape)
    return [int(index) for index in found[1].split(",")] if found else []
