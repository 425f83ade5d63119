"""Plans of the phases of a run, one line each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from graphtrain.cache import Cache
from graphtrain.compile.tasks import Observer
from graphtrain.config.phases import TrainingPhase, training_phases
from graphtrain.config.resolve import ResolvedProgram
from graphtrain.cost_model.assessment import Assessment
from graphtrain.planning.assess import assess_all
from graphtrain.planning.costs import Cost, PhaseSteps, Workload
from graphtrain.planning.formats import format_seconds
from graphtrain.planning.tables import empty_table, megabytes
from graphtrain.planning.text import fit_summary

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class PhasePlan:
    """One phase and the assessment of its training step."""

    phase: TrainingPhase
    assessment: Assessment

    @property
    def steps(self) -> PhaseSteps | None:
        """Steps of the phase, for the cost of the run; None for the last."""
        if self.phase.end is None:
            return None
        count = self.phase.end - self.phase.start
        return PhaseSteps(count, self.phase.program.batch.tokens, self.assessment.time)


def cost_of(
    workload: Workload,
    program: ResolvedProgram,
    assessment: Assessment,
    phases: Sequence[PhasePlan],
) -> Cost:
    """Return what a workload costs with a program, in all phases of its run."""
    earlier = [steps for one in phases if (steps := one.steps)]
    return workload.cost(
        program.target, program.model.dtype, program.batch.tokens, assessment.time, earlier
    )


def assess_phases(
    program: ResolvedProgram,
    last: Assessment,
    cache: Cache,
    observe: Observer,
    *,
    compile: bool,
    jobs: int | None = None,
) -> tuple[PhasePlan, ...]:
    """Assess the training step of every phase; return nothing if the run has only one.

    Args:
        program: The program.
        last: Assessment of the last phase, that of [program].
        cache: Cache to read from and compile into.
        observe: Called with each label and stage of a compilation.
        compile: If False, only estimate.
        jobs: Number of compilations at a time.
    """
    *earlier, final = training_phases(program)
    if not earlier:
        return ()
    programs = {phase.label: phase.program for phase in earlier}
    assessed = assess_all(programs, cache, observe, compile=compile, jobs=jobs)
    plans = [PhasePlan(phase, assessed[phase.label]) for phase in earlier]
    return (*plans, PhasePlan(final, last))


def phases_table(plans: Sequence[PhasePlan]) -> Table:
    """Return the table of phases: steps, batch, memory and time of a step."""
    columns = ("phase", ">steps", ">sequences", ">seq_len", ">microbatches")
    table = empty_table(*columns, "fits", ">peak MB", ">step s", "source")
    for plan in plans:
        phase, memory, batch = plan.phase, plan.assessment.memory, plan.phase.program.batch
        seconds = plan.assessment.time.total
        table.add_row(
            str(phase.number),
            f"{phase.start + 1:,} to {'the last' if phase.end is None else f'{phase.end:,}'}",
            str(batch.global_batch_size),
            str(batch.seq_len),
            str(batch.microbatches),
            "yes" if memory.fits else "no",
            megabytes(memory.peak),
            "-" if seconds is None else format_seconds(seconds),
            memory.source,
        )
    return table


def misfits(plans: Sequence[PhasePlan]) -> Iterator[str]:
    """Yield a line for each earlier phase whose step does not fit into memory."""
    for plan in plans[:-1]:
        if not plan.assessment.memory.fits:
            yield (
                f"phase {plan.phase.number} {fit_summary(plan.assessment)}; give it more "
                "microbatches in [[program.phase]], or plan a larger target"
            )


def phase_as_json(plan: PhasePlan) -> dict[str, Any]:
    """Return one phase as JSON; the last one has no "until"."""
    phase, assessment = plan.phase, plan.assessment
    batch = phase.program.batch
    return {
        "phase": phase.number,
        "from_step": phase.start + 1,
        "until": phase.end,
        "global_batch_size": batch.global_batch_size,
        "seq_len": batch.seq_len,
        "microbatches": batch.microbatches,
        "fits": assessment.memory.fits,
        "peak_bytes": assessment.memory.peak,
        "memory_source": assessment.memory.source,
        "step_seconds": assessment.time.total,
    }
