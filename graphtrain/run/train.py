"""A run from its directory to its summary: load what was compiled before, and train."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import lowering
from graphtrain.cache import Cache
from graphtrain.checkpoints.checkpoint import RestoredState
from graphtrain.config.phases import TrainingPhase
from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema import Program, Run
from graphtrain.models.lora.trainable import has_frozen_weights
from graphtrain.planning.parameters import count_compiled_parameters
from graphtrain.run.agreement import on_all_ranks
from graphtrain.run.callbacks import Callback, check_callbacks
from graphtrain.run.checkpoint_places import finish_uploads, note_restored
from graphtrain.run.data_check import DataCheck
from graphtrain.run.events import RunSummary
from graphtrain.run.export import finish_export
from graphtrain.run.goodput import activities
from graphtrain.run.goodput.timeline import Timeline
from graphtrain.run.initial_weights import InitialWeights, load_initial_weights
from graphtrain.run.loop import TrainingLoop
from graphtrain.run.measurements import record_measurements
from graphtrain.run.metrics import JournalPosition, Report
from graphtrain.run.opening import (
    init_state,
    leave_out,
    load_programs,
    needed_graphs,
    open_checkpoints,
    open_data,
    open_engine,
    open_samples,
    open_tasks_of_run,
    restore_position,
)
from graphtrain.run.phases import PhasePrograms, PhaseSequence, index_of_phase, remaining_phases
from graphtrain.run.profiles.capture import Profiler
from graphtrain.run.programs import LoadedPrograms
from graphtrain.run.resume import data_changed
from graphtrain.run.run_files import discard_journal, measure_nothing, open_journal
from graphtrain.run.signals import StopRequest, stop_requests
from graphtrain.run.spikes import NAME as SPIKES_NAME
from graphtrain.run.spikes import RewindRun, SpikeWindow, rewinds_to
from graphtrain.run.start_position import StartPosition, find_position
from graphtrain.run.surroundings import RunRequest, Surroundings, open_surroundings
from lowering.machine import host, startup
from lowering.trees import Tree
from lowering.xla import distributed

if TYPE_CHECKING:
    from graphtrain.checkpoints.checkpoint import Checkpoints
    from graphtrain.run.training_samples import TrainingSamples
    from graphtrain.run.training_tasks import TrainingTasks


@dataclass(frozen=True)
class _Loaded:
    """Programs and weights that a start has loaded before it computes."""

    parts: Sequence[TrainingPhase]  # phases that are still to be trained
    programs: Sequence[LoadedPrograms]  # of each phase
    first: LoadedPrograms  # of the phase in which the run begins
    initial_weights: InitialWeights | None
    samples: TrainingSamples | None
    tasks: TrainingTasks | None
    prefault: startup.MemoryPrefault


def train(
    program: ResolvedProgram,
    run: Run,
    cache: Cache,
    *,
    compile_hint: str,
    configured: Program | None = None,
    callbacks: Sequence[Callback] = (),
    allowed_changes: Sequence[str] = (),
    fresh: bool = False,
    timeline: Timeline | None = None,
) -> RunSummary:
    """Train up to run.steps with compiled programs, from the last checkpoint if there is one.

    Args:
        program: the program.
        run: settings of the run.
        cache: cache with the compiled programs.
        compile_hint: command that compiles missing programs, for error messages.
        configured: settings of the run on all its hosts; None for those of `program`.
        callbacks: called on rank 0 with what happens.
        allowed_changes: settings whose values may differ from those of the checkpoint.
        fresh: start at step 0; what the directory contains is moved to its folder earlier/.
        timeline: records the phases of this process; None for one that begins now.

    Raises:
        CallbackError: a callback cannot be used, or raised an exception.
        MissingProgram: a graph is not in the cache.
        TrainingError: the loss is not finite, the directory of the run cannot be used, or its
            checkpoints are damaged or of another run.
        DataError: a dataset cannot be used.
        WeightsError: the initial weights cannot be used.
    """
    check_callbacks(callbacks)
    request = RunRequest(program, run, cache, compile_hint, configured, callbacks, allowed_changes)
    outcome = _train_until_rewound(request, timeline or Timeline(), fresh=fresh)
    while not isinstance(outcome, RunSummary):  # start again, as another process would
        distributed.all_gather_text("")  # until rank 0 has recorded the rewind
        outcome = _train_until_rewound(request, Timeline(), fresh=False)
    return outcome


def _train_until_rewound(
    request: RunRequest, timeline: Timeline, *, fresh: bool
) -> RunSummary | RewindRun:
    """Train until the run ends, or is to start again from its last checkpoint."""
    with ExitStack() as stack:
        around = open_surroundings(request, stack, timeline)
        position = find_position(request, around, fresh=fresh)
        if position.is_complete(request.run.steps):
            return _finish_complete(request, around, position)
        if position.is_saved and around.is_rank_zero:
            timeline.open(request.directory)
        loaded = _load(request, around, position)
        stop = stack.enter_context(stop_requests())
        if stop.should_stop():  # while the programs were loaded
            return _stopped_while_loading(stop, request.directory, position.step, timeline)
        stack.enter_context(lowering.backend(request.program.target).forbid_tracing())
        prefaulted_bytes = loaded.prefault.stop()
        baseline_bytes = host.reset_peak() - prefaulted_bytes
        checkpoints = open_checkpoints(
            request.program, request.run, stack, position.uploads, position.disks, around.watchdog
        )
        state, restored = _first_state(request, around, position, loaded, checkpoints)
        if stop.should_stop():  # while a checkpoint was restored
            return _stopped_while_loading(stop, request.directory, position.step, timeline)
        loop, state = _open_loop(
            request, around, position, loaded, checkpoints, state, restored, stop, baseline_bytes
        )
        startup.resume_garbage_collection()
        timeline.begin(position.step, loaded.first.compile_seconds, str(request.program.target))
        return _run_loop(request, around, position, loop, state, stop)


def _finish_complete(
    request: RunRequest, around: Surroundings, position: StartPosition
) -> RunSummary:
    """Finish uploads and the export of a run that has nothing left to train."""
    run, start, history = request.run, position.step, position.history
    stalled = position.is_stalled
    summary = RunSummary(request.directory, start, start, None, None, history.best_step, stalled)
    note_restored(position.disks, start)
    if position.uploads is not None:
        position.uploads.begin(start)
    finish_uploads(run, position.uploads, around.watchdog, start)
    is_shared = position.is_shared
    return finish_export(run, summary, around.watchdog, around.log.note, is_shared=is_shared)


def _stopped_while_loading(
    stop: StopRequest, directory: Path, start: int, timeline: Timeline
) -> RunSummary:
    """Return the outcome of a run that is asked to stop before its first step."""
    assert stop.signal is not None
    timeline.end(f"stopped by {stop.signal.name}")
    return RunSummary(directory, start, start or None, None, stop.signal.name)


def _load(request: RunRequest, around: Surroundings, position: StartPosition) -> _Loaded:
    """Open the initial weights, and all programs that the run executes."""
    program, run, saved = request.program, request.run, position.is_saved
    initial_weights = on_all_ranks(lambda: InitialWeights.open(program, run, resuming=saved))
    has_average = program.optimizer.ema_decay is not None
    names = needed_graphs(run, resuming=saved, has_average=has_average)
    config, places = request.config, (request.cache, request.compile_hint)
    engine = on_all_ranks(lambda: open_engine(config, program, initial_weights, *places))
    samples = open_samples(config, engine)
    tasks = on_all_ranks(lambda: open_tasks_of_run(config, engine, around.stack))
    # Damaged checkpoints may let the run resume from an earlier one.
    oldest = position.resumption.steps[0] if saved else 0
    parts = remaining_phases(program, run.steps, oldest)
    first = index_of_phase(parts, position.step)
    programs, prefault = load_programs(
        parts, first, request.cache, names, request.compile_hint, around.stack, around.timeline
    )
    return _Loaded(parts, programs, programs[first], initial_weights, samples, tasks, prefault)


def _first_state(
    request: RunRequest,
    around: Surroundings,
    position: StartPosition,
    loaded: _Loaded,
    checkpoints: Checkpoints,
) -> tuple[Tree, RestoredState | None]:
    """Return the state before the first step, and the checkpoint that it is from."""
    if not position.is_saved:
        return init_state(loaded.first, request.run.seed), None
    described = loaded.first["train"].inputs("state")
    around.timeline.move(activities.RESTORE)
    restored = position.resumption.restore(checkpoints, described)
    note_restored(position.disks, position.step)
    return restored.state, restored


def _open_loop(
    request: RunRequest,
    around: Surroundings,
    position: StartPosition,
    loaded: _Loaded,
    checkpoints: Checkpoints,
    state: Tree,
    restored: RestoredState | None,
    stop: StopRequest,
    baseline_bytes: int,
) -> tuple[TrainingLoop, Tree]:
    """Open the data and load the initial weights; return the loop, and the state before it."""
    run, program, stack = request.run, request.program, around.stack
    resumption, start = position.resumption, position.step
    around.timeline.move(activities.OPEN_DATA)
    changes = resumption.changes()
    data_check = on_all_ranks(lambda: DataCheck(run.data))  # while the devices compute init
    phases = _open_phases(request, around, position, loaded)
    around.timeline.move(activities.INITIALIZE)
    weights, frozen = loaded.initial_weights, ()
    step = loaded.first["train"]
    if not position.is_saved and weights is not None:
        state = load_initial_weights(weights, step.inputs("state"), state)
    if weights is not None and has_frozen_weights(program.settings):
        trained = step.inputs("state")["parameters"]
        frozen = (weights.frozen(step.inputs("frozen"), trained),)
    if restored is not None:
        restore_position(phases.loader, restored, changes, start)
    rewinds = [] if resumption.fresh else rewinds_to(request.directory, start)
    if rewinds and not data_changed(changes, start):
        on_all_ranks(partial(leave_out, phases.loader, rewinds, request.directory))
    if around.is_rank_zero:
        stack.callback(record_measurements, run, request.cache, phases, start, baseline_bytes)
        stack.enter_context(data_check)
    profiler = Profiler(request.directory, run.profile, program.target.platform, run.steps)
    stack.enter_context(profiler.on_signal())
    loop = TrainingLoop(
        run,
        phases,
        frozen,
        checkpoints,
        _journal_opener(request, around, position, loaded),
        around.notify,
        start,
        data_check,
        changes,
        stop,
        around.watchdog,
        around.timeline,
        position.history,
        loaded.samples,
        loaded.tasks,
        SpikeWindow(run.spikes, resumption.info.spikes if position.is_saved else None),
        profiler,
        len(rewinds),
    )
    return loop, state


def _open_phases(
    request: RunRequest, around: Surroundings, position: StartPosition, loaded: _Loaded
) -> PhaseSequence:
    """Return the phases of the run, and open the data of the current one."""
    identities = [position.identity(part.start + 1) for part in loaded.parts]
    each = zip(loaded.parts, loaded.programs, identities, strict=True)
    phases = PhaseSequence(
        [PhasePrograms(*one) for one in each],
        index_of_phase(loaded.parts, position.step),
        partial(open_data, request.run),
    )
    around.stack.callback(phases.close)
    phases.open()
    return phases


def _journal_opener(
    request: RunRequest, around: Surroundings, position: StartPosition, loaded: _Loaded
) -> Callable[[], tuple[Report, JournalPosition]]:
    """Return what opens the journal, once the first step has been started."""
    uploads = position.uploads
    if not around.is_rank_zero:
        return partial(discard_journal, uploads, position.step)
    return partial(
        open_journal,
        request.config,
        request.program,
        None if position.is_saved else loaded.initial_weights,
        position.resumption,
        count_compiled_parameters(request.program, loaded.first["train"].record),
        around.notify,
        around.stack,
        loaded.samples,
        uploads.measure if uploads else measure_nothing,
        around.timeline,
    )


def _run_loop(
    request: RunRequest,
    around: Surroundings,
    position: StartPosition,
    loop: TrainingLoop,
    state: Tree,
    stop: StopRequest,
) -> RunSummary | RewindRun:
    """Run the steps, then finish uploads and the export."""
    run, directory, timeline = request.run, request.directory, around.timeline
    owed = {"evaluate_first": position.evaluation_owed, "score_first": position.scores_owed}
    with around.watchdog.reporting_errors():
        try:
            summary = loop.run_steps(state, **owed)
        except RewindRun as rewind:
            if stop.should_stop():
                return _stopped_while_loading(stop, directory, position.step, timeline)
            timeline.end(str(rewind))
            if around.is_rank_zero:
                warnings.warn(f"{rewind}; {directory / SPIKES_NAME} says why", stacklevel=1)
            return rewind.with_traceback(None)  # which would hold the state
        timeline.move(activities.SAVE)
        finish_uploads(run, position.uploads, around.watchdog, summary.steps)
        summary = finish_export(
            run,
            summary,
            around.watchdog,
            around.log.note,
            lambda: stop.signal,
            is_shared=position.is_shared,
        )
    if summary.stopped_by:
        timeline.end(f"stopped by {summary.stopped_by}")
    return summary
