"""The answer to `graphtrain plan`: an assessment, how far to trust it, and what to change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from graphtrain.cache import Cache
from graphtrain.compile import Observer
from graphtrain.config.schema import Program
from graphtrain.planning import ledger
from graphtrain.planning.assess import assess
from graphtrain.planning.assessment import Assessment
from graphtrain.planning.ledger import ErrorBar
from graphtrain.planning.remedies import Remedy, Vary, find_remedies


@dataclass(frozen=True)
class Answer:
    """What is said of one program on one target."""

    program: Program
    assessment: Assessment
    error_bars: Mapping[str, ErrorBar]  # by quantity, from the runs of this target
    remedies: Sequence[Remedy] = ()  # where it does not fit


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
    if assessment.memory.fits:
        return Answer(program, assessment, bars)
    remedies = find_remedies(
        assessment, program, vary, cache, confirm=confirm and compile, observe=observe
    )
    return Answer(program, assessment, bars, remedies)
