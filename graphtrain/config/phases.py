"""Phases of a run: a series of programs, each of which trains some of its steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

from graphtrain.config.resolve import ResolvedProgram


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


def describe_placement(program: ResolvedProgram) -> str:
    """Return the machine, the mesh and the microbatches of every phase, in one line."""
    axes = program.mesh.axes.items()
    mesh = " x ".join(f"{name} {size}" for name, size in axes if size > 1)
    batches = []
    for part in training_phases(program):
        batch, label = part.program.batch, f"{part.label}: " if part.label else ""
        padding = f", {batch.padding_sequences} of them padding" * bool(batch.padding_sequences)
        batches.append(f"{label}{batch.microbatches} x {batch.microbatch_rows} sequences{padding}")
    return f"{program.target}, mesh {mesh or 'of 1 device'}, {'; '.join(batches)}"


def program_of_step(program: ResolvedProgram, step: int) -> ResolvedProgram:
    """Return the program of the phase of a step, numbered from 1; at step 0, of the first."""
    return next(phase.program for phase in training_phases(program) if phase.holds(step))
