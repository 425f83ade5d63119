"""Branches of the conditionals of a compiled program, and how often the largest is taken."""

from __future__ import annotations

import re
from fractions import Fraction

from lowering.hlo.text import Instruction

# Iterations of a loop in which the branch with the work is taken, and all of them.
_TAKEN = re.compile(r"taken_(\d+)_of_(\d+)\)*/cond$")


def branches(conditional: Instruction) -> list[str]:
    """Return the names of the computations of which a conditional executes one."""
    return conditional.computations("branch_computations") or [
        name
        for attribute in ("true_computation", "false_computation")
        if (name := conditional.attribute(attribute))
    ]


def fraction_taken(conditional: Instruction) -> Fraction:
    """Return in which part of its executions a conditional takes the branch with the work.

    Its scope states it (lowering/tracing/control_flow.py); without one, it is taken always.
    """
    taken = _TAKEN.search(conditional.op_name)
    return Fraction(int(taken[1]), int(taken[2])) if taken else Fraction(1)
