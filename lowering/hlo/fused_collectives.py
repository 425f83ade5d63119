"""Forms that collectives take inside the fusions and loops of a TPU's program."""

from __future__ import annotations

from lowering.hlo.text import Computation, Instruction

_WINDOWS = {
    "windowed_dot_general_body_ag": "all-gather",
    "windowed_dot_general_body_rs": "reduce-scatter",
}


def is_repeated(computation: Computation, instruction: Instruction) -> bool:
    """Whether the operation only goes on with, or waits for, one that another fusion began.

    A collective that runs beside products is written into the fusion that starts it, each that
    works meanwhile, and the one that waits; only the first calls AsyncCollectiveStart on it.
    """
    rest = instruction.rest
    if "async_collective_fusion_config" not in rest and "chain_id=" not in rest:
        return False
    return not any(
        other.opcode == "custom-call"
        and "AsyncCollectiveStart" in other.rest
        and instruction.name in other.operands
        for other in computation.instructions.values()
    )


def is_scattered(computation: Computation, instruction: Instruction) -> bool:
    """Whether of an all-reduce each device keeps but its own part: a reduce-scatter.

    It is written as a fusion of the all-reduce and slices of it.
    """
    if not computation.name.startswith("all-reduce-scatter"):
        return False
    opcodes = {each.opcode for each in computation.instructions.values()}
    return instruction.opcode == "all-reduce" and "dynamic-slice" in opcodes


def window(computation: Computation) -> str:
    """The collective that a loop takes apart, to send one piece while it multiplies another."""
    for name, op in _WINDOWS.items():
        if name in computation.name:
            return op
    return ""
