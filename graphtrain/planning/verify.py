"""verify: the best strategies of a search, compiled and ranked again."""

from __future__ import annotations

from dataclasses import dataclass

from graphtrain.cache import Cache
from graphtrain.compile import Observer
from graphtrain.planning.assess import assess_all
from graphtrain.planning.assessment import Assessment
from graphtrain.planning.candidates import Candidate
from graphtrain.planning.search import Found

_TRIES = 3  # compilations for each strategy that is asked for, if some turn out not to fit


@dataclass(frozen=True)
class Verified:
    """A strategy, and the compiler's answer."""

    candidate: Candidate
    assessment: Assessment

    @property
    def rank(self) -> tuple[bool, float]:
        return not self.assessment.memory.fits, self.assessment.time.total


def verify(
    found: Found,
    cache: Cache,
    best: int,
    *,
    jobs: int | None = None,
    observe: Observer = lambda label, stage: None,
) -> list[Verified]:
    """Compile the best of a search side by side, until as many as asked fit; fastest first.

    The memory is then the compiler's, and the time that of the collectives it made. Those that did
    not fit after all come last.

    Args:
        best: how many should fit.
    """
    done: list[Verified] = []
    queue = list(found.ranked[: best * _TRIES])
    while queue and (missing := best - sum(one.assessment.memory.fits for one in done)) > 0:
        batch, queue = queue[:missing], queue[missing:]
        programs = {_label(one, len(done) + index): one for index, one in enumerate(batch, 1)}
        assessed = assess_all(
            {label: one.program for label, one in programs.items()}, cache, observe, jobs=jobs
        )
        done += [Verified(one, assessed[label]) for label, one in programs.items()]
    return sorted(done, key=lambda one: one.rank)


def _label(candidate: Candidate, number: int) -> str:
    return f"{number}: {candidate.mesh}"
