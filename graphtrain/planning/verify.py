"""Compile the best strategies of a search, to verify their estimates."""

from collections.abc import Sequence
from dataclasses import replace

from graphtrain.cache import Cache
from graphtrain.compile.tasks import Observer
from graphtrain.planning.assess import assess_all
from graphtrain.planning.candidates import Candidate

COMPILATIONS_PER_STRATEGY = (
    3  # maximum compilations per wanted strategy; more than 1 since some may not fit
)


def compile_best(
    candidates: Sequence[Candidate],
    cache: Cache,
    max_count: int,
    *,
    jobs: int | None = None,
    observe: Observer = lambda label, stage: None,
) -> tuple[Candidate, ...]:
    """Compile candidates in parallel, best first, until `max_count` of them fit; rank these.

    Their memory is the compiler's, and their time is based on the compiled collectives. A candidate
    whose compiler is missing or failed keeps its estimate. Those that do not fit come last.
    """
    assessed: list[Candidate] = []
    queue = list(candidates[: max_count * COMPILATIONS_PER_STRATEGY])
    while (
        queue and (missing := max_count - sum(candidate.memory.fits for candidate in assessed)) > 0
    ):
        batch, queue = queue[:missing], queue[missing:]
        programs = {
            f"{index}: {candidate.mesh}": candidate.program
            for index, candidate in enumerate(batch, len(assessed) + 1)
        }
        answers = assess_all(programs, cache, observe, jobs=jobs).values()
        assessed += [
            replace(
                candidate,
                memory=answer.memory,
                time=answer.time,
                mfu=answer.mfu,
                sent_bytes=sum(each.wire_bytes_per_step for each in answer.collectives),
            )
            for candidate, answer in zip(batch, answers, strict=True)
        ]
    return tuple(
        sorted(assessed, key=lambda candidate: (not candidate.memory.fits, candidate.rank))
    )
