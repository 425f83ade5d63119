"""Answer of `graphtrain plan`: an assessment, its error bars, and changes that would fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphtrain.cache import Cache
from graphtrain.compile.request_keys import request_keys
from graphtrain.compile.tasks import Observer
from graphtrain.config.resolve import ResolvedProgram
from graphtrain.cost_model.assessment import Assessment, StepTime
from graphtrain.cost_model.communication_time import bandwidth_of
from graphtrain.planning import ledger
from graphtrain.planning.assess import assess
from graphtrain.planning.collective_origins import CollectiveOrigin, explain_collectives
from graphtrain.planning.ledger import ErrorBar, StepSource
from graphtrain.planning.parameters import ParameterCount, count_parameters
from graphtrain.planning.phases import PhasePlan, assess_phases
from graphtrain.planning.remedies import Remedy, WithOverrides, find_remedies
from graphtrain.planning.tables import printed_text

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, repr=False)
class Answer:
    """Complete answer of `graphtrain plan` for one program on one target.

    str() is the output of the command.
    """

    program: ResolvedProgram
    assessment: Assessment
    error_bars: Mapping[str, ErrorBar]  # by quantity, from earlier runs on this target
    remedies: Sequence[Remedy] = ()  # changes that would fit; empty if the program fits
    causes: Sequence[CollectiveOrigin] = ()  # one for each compiled collective, in order
    phases: Sequence[PhasePlan] = ()  # of the entire run, if it has several

    @property
    def parameters(self) -> ParameterCount:
        return count_parameters(self.program, self.assessment.plan)

    @property
    def fits(self) -> bool:
        """Return whether the training step, in every phase, fits in the memory of a device."""
        phases = (one.assessment.memory.fits for one in self.phases)
        return self.assessment.memory.fits and all(phases)

    @property
    def peak_bytes(self) -> int:
        """Return the peak memory of a device during a training step."""
        return self.assessment.memory.peak

    @property
    def step_seconds(self) -> float | None:
        """Return the estimated time of a training step; None if unknown."""
        return self.assessment.time.total

    def __repr__(self) -> str:
        from graphtrain.planning.text import fit_summary

        return f"<Answer: {fit_summary(self.assessment)}>"

    def __str__(self) -> str:
        return printed_text(self.print)

    def print(self, console: Console) -> None:
        """Print the output of the command on a console of rich."""
        from graphtrain.planning.text import print_assessment

        print_assessment(
            console,
            self.program,
            self.assessment,
            parameters=self.parameters,
            error_bars=self.error_bars,
            remedies=self.remedies,
            causes=self.causes,
        )
        if self.phases:
            from graphtrain.planning.phases import misfits, phases_table

            console.print()
            console.print(phases_table(self.phases))
            for line in misfits(self.phases):
                console.print(line, soft_wrap=True)

    def _repr_html_(self) -> str:
        from graphtrain.planning.text import assessment_as_html

        return assessment_as_html(self.program, self.assessment, self.remedies)


def answer(
    program: ResolvedProgram,
    vary: WithOverrides,
    cache: Cache,
    *,
    compile: bool = True,
    confirm: bool = True,
    observe: Observer = lambda label, stage: None,
) -> Answer:
    """Assess a program; if it does not fit, search for changes that would fit.

    Raises what assess() raises.

    Args:
        program: the program to assess.
        vary: function that returns the program with settings changed.
        cache: cache to read from and compile into.
        compile: if False, only estimate.
        confirm: if True, compile the remedies too.
        observe: called with each label and stage of a compilation.
    """
    assessment = assess(program, cache, observe, compile=compile)
    bars = ledger.error_bars(
        ledger.read(ledger.ledger_path(cache.root)),
        assessment.target,
        _step_source(assessment.time),
    )
    causes = _causes(program, assessment, cache)
    phases = assess_phases(program, assessment, cache, observe, compile=compile)
    if assessment.memory.fits:
        return Answer(program, assessment, bars, causes=causes, phases=phases)
    remedies = find_remedies(
        assessment, program, vary, cache, confirm=confirm and compile, observe=observe
    )
    return Answer(program, assessment, bars, remedies, causes, phases)


def _step_source(time: StepTime) -> StepSource:
    """Return the source of a step's time, by which the ledger tells predictions apart."""
    if time.measured is not None:
        return "profile"
    return "speeds" if time.speeds else "estimate"


def _causes(
    program: ResolvedProgram, assessment: Assessment, cache: Cache
) -> tuple[CollectiveOrigin, ...]:
    """Explain each compiled collective. Estimated ones follow from the rules: return nothing."""
    compiled = cache.get_by_request(request_keys(program)["train"])
    if compiled is None or assessment.collectives_source != "compiler":
        return ()
    mesh = program.mesh
    speeds = {axis: bandwidth_of((axis,), mesh, program.target) for axis in mesh.axes}
    return explain_collectives(
        program,
        assessment.plan,
        assessment.collectives,
        annotations=compiled.record["annotations"],
        bytes_per_second={axis: speed for axis, speed in speeds.items() if speed},
    )
