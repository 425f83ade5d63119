"""Recognize collectives inside the fusions and loops of a TPU program."""

from __future__ import annotations

from lowering.hlo.text import Computation, Instruction

_WINDOWS = {
    "windowed_dot_general_body_ag": "all-gather",
    "windowed_dot_general_body_rs": "reduce-scatter",
}


def continues_async_collective(computation: Computation, instruction: Instruction) -> bool:
    """Return whether the operation continues, or waits for, a collective started elsewhere.

    A collective that overlaps with matrix products appears in the fusion that starts it, in each
    fusion that computes meanwhile, and in the one that waits for it. Only the first calls
    AsyncCollectiveStart on it.
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


def is_reduce_scatter(computation: Computation, instruction: Instruction) -> bool:
    """Return whether an all-reduce is a reduce-scatter: each device uses only its shard.

    Such a reduce-scatter is a fusion of the all-reduce and slices of its result.
    """
    if not computation.name.startswith("all-reduce-scatter"):
        return False
    opcodes = {each.opcode for each in computation.instructions.values()}
    return instruction.opcode == "all-reduce" and "dynamic-slice" in opcodes


def collective_matmul_op(computation: Computation) -> str:
    """Return the collective that a collective-matmul loop decomposes into permutes; "" for none.

    The loop sends one shard while it multiplies another.
    """
    for name, op in _WINDOWS.items():
        if name in computation.name:
            return op
    return ""
