"""Judgement of a watchdog: whether a rank is stalled, and which rank the others wait for.

Plain functions of times and progress, without threads and clocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from graphtrain.config.schema import Watchdog
from lowering.xla.distributed import names

# What a rank does, in the order of a step.
LOADING = "loading programs, a checkpoint or data"
DATA = "waiting for the data loader"
COMPUTING = "computing"
EVALUATING = "evaluating"
SAMPLING = "generating samples"
SCORING = "evaluating tasks"
SAVING = "saving a checkpoint"
UPLOADING = "uploading a checkpoint"
EXPORTING = "exporting the weights"
_STAGES = (LOADING, DATA, COMPUTING, EVALUATING, SAMPLING, SCORING, SAVING, UPLOADING, EXPORTING)

_MEDIAN_FACTOR = 5  # a step is stalled when it takes this many times the median
_MAX_SILENCE = 60.0  # seconds without a heartbeat after which a rank is lost
# Steps whose time is not typical: the first one is only started, the second waits for it.
_FIRST_STEPS = 2


@dataclass(frozen=True, order=True)
class Progress:
    """Position of a rank in the run; positions are ordered as the run reaches them."""

    step: int  # number of the step that is being taken; 0 before the first
    stage: int  # index into the stages of a step
    batch: int = 0  # of an evaluation

    @classmethod
    def at(cls, stage: str, step: int = 0, batch: int = 0) -> Progress:
        return cls(step, _STAGES.index(stage), batch)

    @property
    def name(self) -> str:
        return _STAGES[self.stage]

    def __str__(self) -> str:
        batch = f", batch {self.batch}" if self.name == EVALUATING else ""
        return f"step {self.step}: {self.name}{batch}" if self.step else self.name


@dataclass
class Stopwatch:
    """Time of the current step, batch of an evaluation, or other phase; and its limit."""

    settings: Watchdog
    progress: Progress = field(default_factory=lambda: Progress.at(LOADING))
    _since: float = 0.0
    _durations: dict[str, deque[float]] = field(default_factory=dict)
    _finished: dict[str, int] = field(default_factory=dict)  # number by kind

    def move(self, progress: Progress, now: float) -> None:
        """Note that the rank has reached a position. Computing belongs to the step of its data."""
        previous, self.progress = self.progress, progress
        if progress.name == COMPUTING and previous.name == DATA:
            return
        kind = _kind(previous)
        self._durations.setdefault(kind, deque(maxlen=50)).append(now - self._since)
        self._finished[kind] = self._finished.get(kind, 0) + 1
        self._since = now

    def seconds(self, now: float) -> float:
        """Return how long the current step or phase has taken."""
        return now - self._since

    def extend(self, seconds: float) -> None:
        """Do not count some of the seconds that have passed."""
        self._since += seconds

    def limit(self, *, others_wait: bool = False) -> float:
        """Return the seconds after which the current step or phase counts as stalled.

        Args:
            others_wait: whether another rank has come further: then its data came in time, so that
                the first batches of this rank have no longer limit than the others.
        """
        kind, settings = _kind(self.progress), self.settings
        is_first = self._finished.get(kind, 0) < _FIRST_STEPS
        if is_first and self.progress.name == DATA and others_wait:
            return settings.step_timeout
        if kind == "phase" or is_first:
            return max(settings.phase_timeout, settings.step_timeout)
        durations = sorted(self._durations[kind])
        median = durations[len(durations) // 2]
        return max(settings.step_timeout, _MEDIAN_FACTOR * median)


def _kind(progress: Progress) -> str:
    kinds = {DATA: "step", COMPUTING: "step", EVALUATING: "evaluation"}
    return kinds.get(progress.name, "phase")


def max_silence(settings: Watchdog) -> float:
    """Return the seconds without a heartbeat after which a rank is considered lost."""
    return min(_MAX_SILENCE, settings.step_timeout or _MAX_SILENCE)


@dataclass(frozen=True)
class Peer:
    """Last known progress of a rank, and the time since its last heartbeat."""

    progress: Progress | None  # None if it never published one
    silent_seconds: float = 0.0  # since its last heartbeat


def behind(ranks: Mapping[int, Peer]) -> dict[int, Progress]:
    """Return the ranks that others have overtaken, with their progress."""
    known = {rank: peer.progress for rank, peer in ranks.items() if peer.progress is not None}
    furthest = max(known.values())
    return {rank: progress for rank, progress in known.items() if progress < furthest}


def blame(ranks: Mapping[int, Peer], silence: float, collective: str = "", first: str = "") -> str:
    """Return one sentence that names the ranks for which the others wait.

    Args:
        ranks: all ranks, this one included.
        silence: seconds without a heartbeat after which a rank counts as silent.
        collective: description of a collective of a step, for ranks that wait in one.
        first: description of the one that a rank keeps the others from which has not begun a step.
    """
    silent = [rank for rank, peer in ranks.items() if peer.silent_seconds > silence]
    if silent:
        words = [
            f"{names([rank])} no longer responds: no heartbeat for "
            f"{ranks[rank].silent_seconds:.0f} s, last in {ranks[rank].progress or 'its start'}"
            for rank in silent[:4]
        ]
        more = f"; {len(silent) - 4} more" if len(silent) > 4 else ""
        return "; ".join(words) + more + " (killed, stopped, or its host is lost)"
    known = {rank: peer.progress for rank, peer in ranks.items() if peer.progress is not None}
    last = min(known.values())
    slowest = [rank for rank, progress in known.items() if progress == last]
    if len(known) == 1:
        return f"{names(slowest)} is stalled in {last}"
    if len(slowest) == len(known):
        return f"all ranks are stalled in {in_collective(last, collective)}"
    others = max(known.values())
    if last.name == DATA and first:  # whatever the others have begun meanwhile
        collective = f"probably in the first collective of step {last.step} between processes"
        collective = f"{collective} ({first})"
    return (
        f"{names(slowest)} {'is' if len(slowest) == 1 else 'are'} behind, stalled in {last}; the "
        f"others wait in {in_collective(others, collective)}"
    )


def in_collective(progress: Progress, collective: str) -> str:
    """Describe a position, with a collective of the step if the rank may wait in one."""
    is_in_step = collective and progress.name in (DATA, COMPUTING)
    return f"{progress}, {collective}" if is_in_step else str(progress)
