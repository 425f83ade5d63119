"""verified: the best of a search as the compiler sees them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

from graphtrain.cache import Cache
from graphtrain.compile import Observer
from graphtrain.planning.assess import assess_all
from graphtrain.planning.search import Candidate, rank

Verified: TypeAlias = Candidate  # whose memory and time, where they could be had, are compiled


def verified(
    candidates: Sequence[Candidate], cache: Cache, jobs: int | None, observe: Observer
) -> tuple[Verified, ...]:
    """Compile candidates side by side, and rank them by what they turn out to hold and send.

    One that the compiler was not asked about, or failed on, keeps its estimate.
    """
    programs = {f"strategy {number}": one.program for number, one in enumerate(candidates, 1)}
    answers = assess_all(programs, cache, observe, jobs=jobs)
    return rank(
        replace(one, memory=answer.memory, time=answer.time, mfu=answer.mfu)
        for one, answer in zip(candidates, answers.values(), strict=True)
    )
