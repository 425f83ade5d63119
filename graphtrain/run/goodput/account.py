"""Account of a run's wall time: seconds in each bucket, which add up to it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from graphtrain.run.goodput.activities import (
    BUCKET_OF_ACTIVITY,
    BUCKETS,
    COMPILE,
    FIRST_STEP,
    LOADING,
    PRODUCTIVE,
    RECOVERY,
    STARTUP,
    STEP,
    UNRECORDED,
    WASTED,
)
from graphtrain.run.goodput.records import Interval, ProcessRecord, read_processes

COMPLETED = "completed"
_ROUNDING = 0.002  # seconds between two intervals that are not a lost line


@dataclass(frozen=True)
class Piece:
    """Time in one bucket, for a picture."""

    start: float  # Unix time
    seconds: float
    bucket: str


@dataclass(frozen=True)
class ProcessSummary:
    """One start of the run."""

    host: str
    started_at: float  # Unix time
    seconds: float
    first_step: int | None  # step from which it trained; None if it did not come so far
    last_step: int | None  # last step that it completed
    wasted_steps: int  # of its steps, number that a later process ran again
    outcome: str  # "completed", "stopped by ...", "error: ...", "killed or lost"


@dataclass(frozen=True)
class Goodput:
    """Wall time of a run by bucket."""

    directory: Path
    wall_seconds: float  # from the first start to the last sign of life, without pauses
    seconds: dict[str, float]  # by bucket, in the order of `activities.BUCKETS`
    processes: list[ProcessSummary]
    steps: int  # number of steps that were kept
    wasted_steps: int
    pause_seconds: float  # between the completion of a run and its continuation; not counted
    preparing_seconds: float  # in which programs were compiled or fetched; in program_startup
    # What compiling the programs took that the last start loaded; None if it is not recorded.
    compile_seconds: float | None
    damaged_lines: int
    pieces: list[Piece] = field(repr=False)

    @property
    def goodput(self) -> float:
        """Share of the wall time in which steps were computed that were kept."""
        return self.seconds[PRODUCTIVE] / self.wall_seconds if self.wall_seconds else 0.0


@dataclass
class _Computation:
    """Time in which a process computed steps; a later restart may waste some of them."""

    start: float  # Unix time
    seconds: float
    process: int
    first: int  # step that it began or continued
    last: int  # last step that it completed or began
    completed: int  # last step that was complete at its end
    kept: float = math.inf  # steps after this one ran again

    @property
    def wasted_seconds(self) -> float:
        """Seconds of the steps that ran again, in proportion to their number."""
        share = (self.last - self.kept) / (self.last - self.first + 1)
        return self.seconds * min(1.0, max(0.0, share))

    def pieces(self) -> Iterator[Piece]:
        kept = self.seconds - self.wasted_seconds
        yield Piece(self.start, kept, PRODUCTIVE)
        yield Piece(self.start + kept, self.wasted_seconds, WASTED)


def read_goodput(directory: Path) -> Goodput:
    """Return the account of the wall time of the run in a directory.

    Raises:
        TrainingError: nothing was recorded, or it cannot be read.
    """
    records = read_processes(directory)
    return account(directory, records.processes, records.damaged_lines)


def account(directory: Path, processes: Sequence[ProcessRecord], damaged_lines: int = 0) -> Goodput:
    """Return the account of the processes of a run, in the order of their starts."""
    pieces: list[Piece] = []
    computations: list[_Computation] = []
    mean_step = _mean_step_seconds(processes)
    now, pause = (processes[0].began_at if processes else 0.0), 0.0
    for number, process in enumerate(processes):
        gap = max(0.0, process.began_at - now)
        if number and processes[number - 1].outcome == COMPLETED:
            pause += gap
        else:
            pieces.append(Piece(now, gap, RECOVERY))
        now += gap
        if process.first_step is not None:
            for computation in computations:
                computation.kept = min(computation.kept, process.first_step)
        for interval in _merged(process.intervals):
            start = max(now, interval.end - interval.seconds)
            if start - now < _ROUNDING:
                start = now
            pieces.append(Piece(now, start - now, UNRECORDED))
            seconds = max(0.0, interval.end - start)
            if interval.activity in (FIRST_STEP, STEP):
                idle, computation = _split(interval, start, seconds, number, mean_step)
                pieces += idle
                computations.append(computation)
            else:
                pieces.append(Piece(start, seconds, BUCKET_OF_ACTIVITY[interval.activity]))
            now = start + seconds
        pieces.append(Piece(now, max(0.0, process.ended_at - now), UNRECORDED))
        now = max(now, process.ended_at)
    pieces += [piece for computation in computations for piece in computation.pieces()]
    pieces = sorted((one for one in pieces if one.seconds > 0), key=lambda one: one.start)
    summaries = [
        _summary(one, [c for c in computations if c.process == number])
        for number, one in enumerate(processes)
    ]
    compiled = processes[-1].compile_seconds if processes else {}
    return Goodput(
        directory,
        now - processes[0].began_at - pause if processes else 0.0,
        {name: sum((p.seconds for p in pieces if p.bucket == name), 0.0) for name in BUCKETS},
        summaries,
        max((int(min(one.completed, one.kept)) for one in computations), default=0),
        sum(one.wasted_steps for one in summaries),
        pause,
        sum(i.seconds for one in processes for i in one.intervals if i.activity == COMPILE),
        sum(compiled.values()) if compiled else None,
        damaged_lines,
        pieces,
    )


def _split(
    interval: Interval, start: float, seconds: float, process: int, mean_step: float | None
) -> tuple[list[Piece], _Computation]:
    """Split an interval of steps into what was no computation, and the computation."""
    waited = max(0.0, interval.late_seconds - interval.late * (mean_step or 0.0))
    waited = min(waited, seconds)
    computed, startup = seconds - waited, 0.0
    if interval.activity == FIRST_STEP and mean_step is not None:
        startup = max(0.0, computed - mean_step)
    idle = [Piece(start, waited, LOADING), Piece(start + waited, startup, STARTUP)]
    first = interval.step - interval.steps + 1
    last = max(interval.step, first)
    begin = start + waited + startup
    return idle, _Computation(begin, computed - startup, process, first, last, interval.step)


def _mean_step_seconds(processes: Sequence[ProcessRecord]) -> float | None:
    """Return the mean time of steps whose data came in time; None if there are none."""
    total, steps = 0.0, 0
    for process in processes:
        waiting = 0.0  # lines of a step that is not complete yet
        for interval in process.intervals:
            if interval.activity != STEP or interval.late:
                waiting = 0.0
                continue
            waiting += interval.seconds
            if interval.steps:
                total, steps, waiting = total + waiting, steps + interval.steps, 0.0
    return total / steps if steps else None


def _merged(intervals: Sequence[Interval]) -> list[Interval]:
    """Return the intervals in order, with one for the first step, which may have several lines."""
    ordered = sorted(intervals, key=lambda one: one.end)
    first = [one for one in ordered if one.activity == FIRST_STEP]
    if not first:
        return ordered
    merged = replace(
        first[-1],
        seconds=first[-1].end - first[0].end + first[0].seconds,
        steps=sum(one.steps for one in first),
        late=sum(one.late for one in first),
        late_seconds=sum(one.late_seconds for one in first),
    )
    others = [one for one in ordered if one.activity != FIRST_STEP]
    return sorted([merged, *others], key=lambda one: one.end)


def _summary(process: ProcessRecord, computations: Sequence[_Computation]) -> ProcessSummary:
    completed = [one.step for one in process.intervals if one.steps]
    last = max(completed, default=None)
    kept = min((one.kept for one in computations), default=math.inf)
    wasted = 0 if last is None else max(0, last - max(kept, process.first_step or 0))
    return ProcessSummary(
        process.host,
        process.began_at,
        max(0.0, process.ended_at - process.began_at),
        process.first_step,
        last,
        int(wasted),
        process.outcome or "killed or lost",
    )
