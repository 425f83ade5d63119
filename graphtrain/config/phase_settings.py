"""Settings of the phases of a run; imports no targets, so that every command may."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from graphtrain.config.schema import Program


def without_phases(program: Program) -> Program:
    """Return the settings of the last part of a run."""
    return replace(program, phase=None) if program.phase is not None else program


def settings_of_step(program: Program, step: int) -> Program:
    """Return the settings of the program that trains a step, numbered from 1, without phases.

    Step 0, the state before training, has those of the first step.
    """
    for phase in program.phases:
        if step <= phase.until:
            return program.in_phase(phase)
    return without_phases(program)


def schedule(program: Program) -> list[dict[str, Any]]:
    """Return what each phase computes, in order, as JSON; empty if there is only one."""
    if not program.phases:
        return []
    ends: Sequence[int | None] = [*(phase.until for phase in program.phases), None]
    parts = [*(program.in_phase(phase) for phase in program.phases), without_phases(program)]
    return [
        {
            "until": end,
            "global_batch_size": part.batch.global_batch_size,
            "seq_len": part.batch.seq_len,
        }
        | _rotary(part, program)
        for end, part in zip(ends, parts, strict=True)
    ]


def _rotary(part: Program, program: Program) -> dict[str, Any]:
    """Return the rotary positions of a phase, if some phase has others than [program.model]."""
    if not any(phase.changes_model for phase in program.phases):
        return {}
    is_scaled = part.model.rope_scaling is not None
    return {"rope_theta": part.model.rope_theta, "rope_scaling": is_scaled}
