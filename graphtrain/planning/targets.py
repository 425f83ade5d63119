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
from graphtrain.planning.remedies import WithOverrides
from sharding_rules.errors import UserError


@dataclass(frozen=True)
class TargetRow:
    """One target: the assessment of the program and what the workload costs, or the error."""

    target: str
    assessment: Assessment | None
    error: str = ""
    cost: Cost = field(default_factory=Cost)


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
    return [
        TargetRow(name, one, cost=_cost(workload, programs[name], one))
        if (one := assessed.get(name))
        else TargetRow(name, None, errors.get(name, ""))
        for name in targets
    ]


def _cost(workload: Workload, program: ResolvedProgram, assessment: Assessment) -> Cost:
    return workload.cost(program.target, program.model.dtype, program.batch.tokens, assessment.time)
