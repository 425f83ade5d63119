"""verified: the best strategies of a search as the compiler sees them."""

from collections.abc import Sequence
from dataclasses import replace

from graphtrain.cache import Cache
from graphtrain.compile.tasks import Observer
from graphtrain.planning.assess import assess_all
from graphtrain.planning.candidates import Candidate

TRIES = 3  # compilations for each strategy that is asked for, where some turn out not to fit


def verified(
    candidates: Sequence[Candidate],
    cache: Cache,
    wanted: int,
    *,
    jobs: int | None = None,
    observe: Observer = lambda label, stage: None,
) -> tuple[Candidate, ...]:
    """Compile candidates side by side, best first, until as many as wanted fit; rank them again.

    Their memory is then the compiler's, and their time that of the collectives it made; one that
    the compiler was not asked about, or failed on, keeps its estimate. Those that do not fit after
    all come last.
    """
    done: list[Candidate] = []
    queue = list(candidates[: wanted * TRIES])
    while queue and (missing := wanted - sum(one.memory.fits for one in done)) > 0:
        batch, queue = queue[:missing], queue[missing:]
        programs = {
            f"{number}: {one.mesh}": one.program for number, one in enumerate(batch, len(done) + 1)
        }
        answers = assess_all(programs, cache, observe, jobs=jobs).values()
        done += [
            replace(one, memory=answer.memory, time=answer.time, mfu=answer.mfu)
            for one, answer in zip(batch, answers, strict=True)
        ]
    return tuple(sorted(done, key=lambda one: (not one.memory.fits, one.rank)))
