"""Sums of gradients in the program of a pipeline: which of them have compute beside them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from lowering.hlo.text import Computation, Instruction
from lowering.tracing.gradient_scopes import BESIDE_TICK

if TYPE_CHECKING:
    from lowering.hlo.collectives import Collective

_SUMS = ("all-reduce", "reduce-scatter")


def has_compute_beside(
    computation: Computation, start: Instruction, flops: Callable[[Instruction], float]
) -> bool:
    """Return whether products are scheduled between the start and the end of a collective.

    Args:
        computation: A scheduled computation.
        start: One of its instructions; if it waits for its end itself, nothing is beside it.
        flops: Function that returns the FLOPs of an instruction of the computation.
    """
    if not start.opcode.endswith("-start"):
        return False
    instructions = iter(computation.instructions.values())
    for each in instructions:
        if each is start:
            break
    for each in instructions:
        if start.name in each.operands and each.opcode.endswith("-done"):
            return False
        if flops(each):
            return True
    return False


def mark_exposed(collectives: Iterable[Collective]) -> tuple[Collective, ...]:
    """Set `exposed` on sums of gradients of a pipeline that have no compute beside them.

    They are those outside of its loops, after its last tick, and those of a tick that the compiler
    does not overlap with it. Sums of tensor parallelism are outside too, in ticks that the compiler
    unrolled.
    """

    def is_exposed(each: Collective) -> bool:
        if each.op not in _SUMS or each.beside_tick:
            return False
        return BESIDE_TICK in each.scope or (not each.loops and "tensor" not in each.axes)

    return tuple(dataclasses.replace(each, exposed=is_exposed(each)) for each in collectives)
