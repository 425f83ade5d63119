"""The answer to `graphtrain plan`: an assessment, how far to trust it, and what to change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from graphtrain.cache import Cache
from graphtrain.compile.request_keys import request_keys
from graphtrain.compile.tasks import Observer
from graphtrain.config.schema import Program
from graphtrain.cost_model.assessment import Assessment
from graphtrain.cost_model.time import bandwidth_of
from graphtrain.planning import ledger
from graphtrain.planning.assess import assess
from graphtrain.planning.blame import Cause, blame
from graphtrain.planning.ledger import ErrorBar
from graphtrain.planning.remedies import Remedy, Vary, find_remedies
from lowering.machine.target import Target
from sharding_rules.rules import Rules


@dataclass(frozen=True)
class Answer:
    """What is said of one program on one target."""

    program: Program
    assessment: Assessment
    error_bars: Mapping[str, ErrorBar]  # by quantity, from the runs of this target
    remedies: Sequence[Remedy] = ()  # where it does not fit
    causes: Sequence[Cause] = ()  # of the compiled collectives, in their order


def answer(
    program: Program,
    vary: Vary,
    cache: Cache,
    *,
    compile: bool = True,
    confirm: bool = True,
    observe: Observer = lambda label, stage: None,
) -> Answer:
    """Assess a program, and look for what would fit if it does not.

    Args:
        vary: the program with settings changed.
        compile: ask the compiler, or estimate alone.
        confirm: compile the remedies too.

    Raises:
        as assess.
    """
    assessment = assess(program, cache, observe, compile=compile)
    bars = ledger.error_bars(ledger.read(ledger.ledger_path(cache.root)), assessment.target)
    causes = _causes(program, assessment, cache)
    if assessment.memory.fits:
        return Answer(program, assessment, bars, causes=causes)
    remedies = find_remedies(
        assessment, program, vary, cache, confirm=confirm and compile, observe=observe
    )
    return Answer(program, assessment, bars, remedies, causes)


def _causes(program: Program, assessment: Assessment, cache: Cache) -> tuple[Cause, ...]:
    """Why each compiled collective is there; nothing of estimated ones, which are there by rule."""
    compiled = cache.find(request_keys(program)["train"])
    if compiled is None or assessment.collectives_source != "compiler":
        return ()
    mesh, target = assessment.plan.mesh, Target.parse(program.target)
    speeds = {axis: bandwidth_of((axis,), mesh, target) for axis in mesh.axes}
    return blame(
        program,
        assessment.plan,
        Rules.load(program.rules),
        assessment.collectives,
        annotations=compiled.record["annotations"],
        bytes_per_second={axis: speed for axis, speed in speeds.items() if speed},
    )
