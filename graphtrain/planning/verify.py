"""Compile the best strategies of a search, to verify their estimates."""

from collections.abc import Sequence
from dataclasses import replace

from graphtrain.cache import Cache
from graphtrain.compile.tasks import Observer
from graphtrain.planning.assess import compile_each
from graphtrain.planning.candidate import Candidate
from sharding_rules.errors import UserError

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
    whose compiler is missing or failed keeps its estimate, and comes after those that were
    compiled. Where a profile of this machine times some steps and not others, the others come after
    them with the reason: bounds do not compare with times. Those that do not fit, or that tracing
    refuses, come last.
    """
    assessed: list[Candidate] = []
    queue = list(candidates[: max_count * COMPILATIONS_PER_STRATEGY])
    while queue and (missing := max_count - sum(candidate.fits for candidate in assessed)) > 0:
        batch, queue = queue[:missing], queue[missing:]
        named = {
            f"{index}: {candidate.mesh}": candidate
            for index, candidate in enumerate(batch, len(assessed) + 1)
        }
        programs = {name: candidate.program for name, candidate in named.items()}
        answers = compile_each(programs, cache, observe, jobs=jobs)
        for name, candidate in named.items():
            answer = answers[name]
            if isinstance(answer, UserError):
                assessed.append(replace(candidate, refused=True, note=str(answer)))
            else:
                assessed.append(candidate.compiled(answer))
    return tuple(sorted(_with_reasons(assessed), key=_order))


def _with_reasons(assessed: Sequence[Candidate]) -> list[Candidate]:
    """Return candidates with the reason why they have no time by the profile that others have."""
    if not any(candidate.is_timed for candidate in assessed):
        return [*assessed]
    return [
        _with_reason(candidate)
        if candidate.is_compiled and candidate.time and not candidate.is_timed
        else candidate
        for candidate in assessed
    ]


def _with_reason(candidate: Candidate) -> Candidate:
    assert candidate.time
    reason = f"ranked after those with a time: {candidate.time.profile_note}"
    return replace(candidate, note="; ".join(filter(None, (candidate.note, reason))))


def _order(candidate: Candidate) -> tuple[object, ...]:
    return (
        not candidate.fits,
        not candidate.is_compiled,
        not candidate.is_timed,
        candidate.rank,
    )
