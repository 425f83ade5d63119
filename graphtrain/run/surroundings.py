"""Surroundings of a run in one process: its log, watchdog, trackers, callbacks and lock."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from graphtrain.cache import Cache
from graphtrain.checkpoints.checkpoint import check_directory
from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema import Config, Program, Run
from graphtrain.run.agreement import on_all_ranks
from graphtrain.run.callbacks import Callback, Notify, notify
from graphtrain.run.directory_lock import locked_run_directory
from graphtrain.run.file_uploads import uploading_files
from graphtrain.run.goodput import activities
from graphtrain.run.goodput.timeline import Timeline
from graphtrain.run.log import RunLog
from graphtrain.run.trackers.thread import tracking
from graphtrain.run.watchdog import Watchdog, watched
from lowering.xla import distributed


@dataclass(frozen=True)
class RunRequest:
    """Request to train a program; see `train`."""

    program: ResolvedProgram
    run: Run
    cache: Cache
    compile_hint: str
    configured: Program | None
    callbacks: Sequence[Callback]
    allowed_changes: Sequence[str]

    @property
    def config(self) -> Config:
        """Settings of the run on all its hosts."""
        return Config(program=self.configured or self.program.run_settings, run=self.run)

    @property
    def directory(self) -> Path:
        return Path(self.run.directory)


@dataclass(frozen=True)
class Surroundings:
    """Log, watchdog and observers of a run in this process, until the stack is closed."""

    stack: ExitStack
    timeline: Timeline
    log: RunLog
    watchdog: Watchdog
    observers: list[object]  # whose methods are called with what happens; none but on rank 0
    is_rank_zero: bool  # rank 0 writes the files that all ranks share

    @property
    def notify(self) -> Notify:
        """Return what calls the observers."""
        return partial(notify, self.observers)


def open_surroundings(request: RunRequest, stack: ExitStack, timeline: Timeline) -> Surroundings:
    """Open the log, trackers and watchdog of a run, and lock its directory.

    Raises:
        TrainingError: the directory cannot be used, or another run uses it.
    """
    run, directory = request.run, request.directory
    check_directory(directory)
    is_rank_zero = distributed.rank() == 0
    log = RunLog(directory, run.steps, run.report_every)
    timeline.move(activities.PREPARE)
    # The first to begin, so that the last upload has the last lines of the log.
    copies = stack.enter_context(uploading_files(run, log.note)) if is_rank_zero else []
    stack.enter_context(log.recording())
    stack.enter_context(timeline.recording())
    trackers = stack.enter_context(tracking(run)) if is_rank_zero else []
    observers: list[object] = []
    if is_rank_zero:
        observers += [log, *copies, *trackers, *request.callbacks]
    watchdog = stack.enter_context(watched(run.watchdog, directory))
    watchdog.before_exit = timeline.end
    on_all_ranks(
        lambda: stack.enter_context(locked_run_directory(directory)) if is_rank_zero else None
    )
    return Surroundings(stack, timeline, log, watchdog, observers, is_rank_zero)
