"""Transfers across TPU slices in a compiled program: those of the Megascale runtime.

XLA compiles the program of one slice. A collective across slices is a send to, and a receive from,
that runtime, between collectives inside of the slice.
"""

from __future__ import annotations

import re

from lowering.hlo.text import Instruction

_TYPE = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_OPS = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
}


def operation_across_slices(instruction: Instruction) -> str | None:
    """Return the collective whose part across slices an instruction sends; None if it sends none.

    What is no collective of a group is sent from one slice to one other.
    """
    if instruction.opcode != "send":
        return None
    kind = _TYPE.search(instruction.rest)
    return _OPS.get(kind[1], "collective-permute") if kind else None
