"""Comparison of one program on several targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphtrain.cache import Cache
from graphtrain.compile.tasks import Observer
from graphtrain.config.resolve import ResolvedProgram
from graphtrain.cost_model.assessment import Assessment
from graphtrain.planning.assess import assess_all
from graphtrain.planning.remedies import WithOverrides
from sharding_rules.errors import UserError


@dataclass(frozen=True)
class TargetRow:
    """One target: the assessment of the program, or the error."""

    target: str
    assessment: Assessment | None
    error: str = ""


def compare_targets(
    targets: Sequence[str],
    vary: WithOverrides,
    cache: Cache,
    *,
    compile: bool = True,
    jobs: int | None = None,
    observe: Observer = lambda label, stage: None,
) -> list[TargetRow]:
    """Assess a program on every target, compiling in parallel; errors are stored in the rows."""
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
    return [TargetRow(name, assessed.get(name), errors.get(name, "")) for name in targets]
