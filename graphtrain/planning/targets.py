"""Comparison of one program on several targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from graphtrain.cache import Cache
from graphtrain.compile.tasks import Observer
from graphtrain.config.resolve import ResolvedProgram
from graphtrain.cost_model.assessment import Assessment
from graphtrain.planning.assess import assess_all
from graphtrain.planning.costs import Cost, Workload
from graphtrain.planning.phases import PhasePlan, assess_phases, cost_of
from graphtrain.planning.remedies import WithOverrides
from sharding_rules.errors import UserError


@dataclass(frozen=True)
class TargetRow:
    """One target: the assessment of the program and what the workload costs, or the error."""

    target: str
    assessment: Assessment | None
    error: str = ""
    cost: Cost = field(default_factory=Cost)
    phases: Sequence[PhasePlan] = ()  # of the entire run, if it has several

    @property
    def fits(self) -> bool:
        """Return true if the target has the memory of every phase."""
        return self.largest is not None and self.largest.memory.fits

    @property
    def largest(self) -> Assessment | None:
        """Assessment of the phase that needs most memory."""
        assessed = [self.assessment, *(one.assessment for one in self.phases)]
        found = [one for one in assessed if one is not None]
        return max(found, key=lambda one: (not one.memory.fits, one.memory.peak), default=None)


def compare_targets(
    targets: Sequence[str],
    vary: WithOverrides,
    cache: Cache,
    workload: Workload,
    *,
    compile: bool = True,
    jobs: int | None = None,
    observe: Observer = lambda label, stage: None,
) -> list[TargetRow]:
    """Assess a program on every target, compiling in parallel; errors are stored in the rows.

    Raises:
        PlanError: a price is missing.
    """
    programs: dict[str, ResolvedProgram] = {}
    errors: dict[str, str] = {}
    for target in targets:
        try:
            program = vary([f"program.target={target}"])
            assess_all({target: program}, cache, compile=False)
            programs[target] = program
        except UserError as error:
            errors[target] = str(error)
    assessed = assess_all(programs, cache, observe, compile=compile, jobs=jobs)
    rows = []
    for name in targets:
        if (last := assessed.get(name)) is None:
            rows.append(TargetRow(name, None, errors.get(name, "")))
            continue
        phases = assess_phases(programs[name], last, cache, observe, compile=compile, jobs=jobs)
        cost = cost_of(workload, programs[name], last, phases)
        rows.append(TargetRow(name, last, cost=cost, phases=phases))
    return rows
