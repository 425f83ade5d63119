"""Phases of a run: a series of programs, each of which trains some of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from graphtrain.config.resolve import ResolvedProgram, without_phases
from graphtrain.config.schema import Program


@dataclass(frozen=True)
class TrainingPhase:
    """One part of a run: the steps from start + 1 to end, with one program."""

    number: int  # from 1
    start: int  # completed steps before it
    end: int | None  # last step; None: that of the run
    program: ResolvedProgram

    @property
    def label(self) -> str:
        """Return a name for the user: empty for the last one, whose settings are [program]'s."""
        return "" if self.end is None else f"phase {self.number}"

    def holds(self, step: int) -> bool:
        """Return whether a step, numbered from 1, is of this phase; step 0 is of the first."""
        return max(step, 1) > self.start and (self.end is None or step <= self.end)


def training_phases(program: ResolvedProgram) -> tuple[TrainingPhase, ...]:
    """Return the phases of a run in order; a run without [[program.phase]] has one.

    Raises:
        ShardingError: layers or microbatches of a phase cannot be divided among the stages.
    """
    base = replace(program, phases=())
    ends = [phase.until for phase in program.phases]
    starts = [0, *ends]
    return (
        *(
            TrainingPhase(
                number, start, phase.until, base.with_settings(base.settings.in_phase(phase))
            )
            for number, (start, phase) in enumerate(zip(starts, program.phases, strict=False), 1)
        ),
        TrainingPhase(len(ends) + 1, starts[-1], None, base),
    )


def program_of_step(program: ResolvedProgram, step: int) -> ResolvedProgram:
    """Return the program of the phase of a step, numbered from 1; at step 0, of the first."""
    return next(phase.program for phase in training_phases(program) if phase.holds(step))


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
