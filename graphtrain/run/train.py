"""A run from its directory to its summary: load what was compiled before, and train."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import lowering
from graphtrain.cache import Cache
from graphtrain.checkpoints.checkpoint import Checkpoints, RestoredState, check_directory
from graphtrain.checkpoints.layer_order import layer_order_of
from graphtrain.checkpoints.output_directory import write_errors
from graphtrain.checkpoints.steps import Retention
from graphtrain.config import render
from graphtrain.config.phases import TrainingPhase
from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.run_record import write_run_config
from graphtrain.config.schema import Config, Program, Run
from graphtrain.cost_model.native_equivalent import sizes_unknown
from graphtrain.errors import DataError, TrainingError
from graphtrain.graphs.names import (
    EVALUATE_AVERAGED,
    VERIFICATION_GRAPHS,
    purpose_while_training,
)
from graphtrain.models.lora.trainable import has_frozen_weights
from graphtrain.planning.parameters import ParameterCount, count_compiled_parameters
from graphtrain.run.agreement import (
    check_same_data,
    check_same_executables,
    on_all_ranks,
    on_all_ranks_long,
)
from graphtrain.run.batch_placement import BatchPlacement
from graphtrain.run.callbacks import Callback, check_callbacks, notify
from graphtrain.run.checkpoint_places import (
    fetch_instead,
    finish_uploads,
    note_restored,
    open_uploads,
    prepare_checkpoints,
    shares_directory,
)
from graphtrain.run.data_check import DataCheck
from graphtrain.run.directory_lock import locked_run_directory
from graphtrain.run.earlier_runs import set_aside, set_metrics_aside
from graphtrain.run.events import RunStart, RunSummary
from graphtrain.run.export import finish_export
from graphtrain.run.file_uploads import uploading_files
from graphtrain.run.goodput import activities
from graphtrain.run.goodput.timeline import Timeline
from graphtrain.run.initial_weights import InitialWeights, load_initial_weights
from graphtrain.run.log import RunLog
from graphtrain.run.loop import (
    JournalPosition,
    Notify,
    Report,
    TrainingLoop,
    are_scores_due,
    is_evaluation_due,
    run_validation_batches,
)
from graphtrain.run.metrics import Journal, Record, has_scores, read_journal
from graphtrain.run.phases import PhasePrograms, PhaseSequence, index_of_phase, remaining_phases
from graphtrain.run.profiles.capture import Profiler
from graphtrain.run.programs import LoadedPrograms
from graphtrain.run.resume import (
    Resumption,
    batch_changed,
    data_changed,
    identity_of,
    schedule_note,
)
from graphtrain.run.signals import StopRequest, stop_requests
from graphtrain.run.spikes import NAME as SPIKES_NAME
from graphtrain.run.spikes import RewindRun, SpikeWindow, rewinds_to
from graphtrain.run.stalls import LOADING
from graphtrain.run.trackers.thread import tracking
from graphtrain.run.training_data import training_loader
from graphtrain.run.validation_history import recorded_history
from graphtrain.run.watchdog import Watchdog, watched
from lowering.machine import host, startup
from lowering.machine.extras import optional_import
from lowering.machine.target import Target
from lowering.trees import Tree
from lowering.xla import distributed
from sharding_rules.errors import ShardingError

if TYPE_CHECKING:
    from graphtrain.run.host_disks import HostDisks
    from graphtrain.run.training_engine import TrainingEngine
    from graphtrain.run.training_samples import TrainingSamples
    from graphtrain.run.training_tasks import TrainingTasks
    from graphtrain.run.uploads import Uploads


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
    arguments = program, run, cache, compile_hint, configured, callbacks, allowed_changes
    outcome = _train_until_rewound(*arguments, fresh, timeline or Timeline())
    while not isinstance(outcome, RunSummary):  # start again, as another process would
        distributed.all_gather_text("")  # until rank 0 has recorded the rewind
        outcome = _train_until_rewound(*arguments, False, Timeline())
    return outcome


def _train_until_rewound(
    program: ResolvedProgram,
    run: Run,
    cache: Cache,
    compile_hint: str,
    configured: Program | None,
    callbacks: Sequence[Callback],
    allowed_changes: Sequence[str],
    fresh: bool,
    timeline: Timeline,
) -> RunSummary | RewindRun:
    """Train until the run ends, or is to start again from its last checkpoint."""
    directory = Path(run.directory)
    check_directory(directory)
    is_rank_zero = distributed.rank() == 0  # rank 0 writes the files that all ranks share
    log = RunLog(directory, run.steps, run.report_every)
    timeline.move(activities.PREPARE)
    with ExitStack() as stack:
        # The first to begin, so that the last upload has the last lines of the log.
        copies = stack.enter_context(uploading_files(run, log.note)) if is_rank_zero else []
        stack.enter_context(log.recording())
        stack.enter_context(timeline.recording())
        trackers = stack.enter_context(tracking(run)) if is_rank_zero else []
        observers: list[object] = []
        if is_rank_zero:
            observers += [log, *copies, *trackers, *callbacks]
        notify_callbacks = partial(notify, observers)
        watchdog = stack.enter_context(watched(run.watchdog, directory))
        watchdog.before_exit = timeline.end
        on_all_ranks(
            lambda: stack.enter_context(locked_run_directory(directory)) if is_rank_zero else None
        )
        config = Config(program=configured or program.run_settings, run=run)
        identity = partial(identity_of, config)
        check_same_data(on_all_ranks(identity))  # which reads descriptions of datasets
        timeline.move(activities.RESTORE)
        disks = prepare_checkpoints(
            run, identity, allowed_changes, watchdog, log, stack, fresh=fresh
        )
        timeline.move(activities.PREPARE)
        uploads = open_uploads(run, log, disks)
        if uploads is not None:
            observers.insert(1, uploads)
            stack.callback(uploads.close)
        fetch = fetch_instead(run, disks, identity, allowed_changes, watchdog)
        resumption = Resumption(
            directory,
            identity,
            allowed_changes,
            fresh=fresh,
            fetch=fetch,
            peer_steps=disks.steps if disks else None,
            is_shared=shares_directory(disks),
        )
        saved = bool(resumption.steps)
        history = recorded_history(directory, resumption.start)
        evaluation_owed = saved and is_evaluation_owed(run, resumption.start)
        scores_owed = saved and are_scores_owed(run, resumption.start)
        stalled = history.has_stalled(run.early_stopping_patience)
        is_complete = resumption.start >= run.steps or stalled
        if is_complete and not (evaluation_owed or scores_owed):
            start = resumption.start
            summary = RunSummary(directory, start, start, None, None, history.best_step, stalled)
            note_restored(disks, start)
            if uploads is not None:
                uploads.begin(start)
            finish_uploads(run, uploads, watchdog, start)
            return finish_export(
                run, summary, watchdog, log.note, is_shared=shares_directory(disks)
            )
        if saved and is_rank_zero:
            timeline.open(directory)
        initial_weights = on_all_ranks(lambda: InitialWeights.open(program, run, resuming=saved))
        has_average = program.optimizer.ema_decay is not None
        names = needed_graphs(run, resuming=saved, has_average=has_average)
        engine = on_all_ranks(
            lambda: _open_engine(config, program, initial_weights, cache, compile_hint)
        )
        samples = _open_samples(config, engine)
        tasks = on_all_ranks(lambda: _open_tasks(config, engine, stack))
        # Damaged checkpoints may let the run resume from an earlier one.
        parts = remaining_phases(program, run.steps, resumption.steps[0] if saved else 0)
        first = index_of_phase(parts, resumption.start)
        loaded, prefault = _load_programs(parts, first, cache, names, compile_hint, stack, timeline)
        programs = loaded[first]
        stop = stack.enter_context(stop_requests())
        if stop.should_stop():  # while the programs were loaded
            return _stopped_while_loading(stop, directory, resumption.start, timeline)
        stack.enter_context(lowering.backend(program.target).forbid_tracing())
        prefaulted_bytes = prefault.stop()
        baseline_bytes = host.reset_peak() - prefaulted_bytes
        checkpoints = _open_checkpoints(program, run, stack, uploads, disks, watchdog)
        restored = None
        if saved:
            described = programs["train"].inputs("state")
            timeline.move(activities.RESTORE)
            restored = resumption.restore(checkpoints, described)
            state = restored.state
            note_restored(disks, resumption.start)
        else:
            state = _init_state(programs, run.seed)
        if stop.should_stop():  # while a checkpoint was restored
            return _stopped_while_loading(stop, directory, resumption.start, timeline)
        timeline.move(activities.OPEN_DATA)
        start, changes = resumption.start, resumption.changes()
        data_check = on_all_ranks(lambda: DataCheck(run.data))  # while the devices compute init
        identities = [identity(part.start + 1) for part in parts]
        phases = PhaseSequence(
            [PhasePrograms(*each) for each in zip(parts, loaded, identities, strict=True)],
            index_of_phase(parts, start),
            partial(_open_data, run),
        )
        stack.callback(phases.close)
        phases.open()
        timeline.move(activities.INITIALIZE)
        if not saved and initial_weights is not None:
            described = programs["train"].inputs("state")
            state = load_initial_weights(initial_weights, described, state)
        step = programs["train"]
        frozen = ()
        if initial_weights is not None and has_frozen_weights(program.settings):
            trained = step.inputs("state")["parameters"]
            frozen = (initial_weights.frozen(step.inputs("frozen"), trained),)
        if restored is not None:
            _restore_position(phases.loader, restored, changes, start)
        rewinds = [] if fresh else rewinds_to(directory, start)
        if rewinds and not data_changed(changes, start):
            on_all_ranks(partial(_leave_out, phases.loader, rewinds, directory))
        if is_rank_zero:
            stack.callback(_record_measurements, run, cache, phases, start, baseline_bytes)
            stack.enter_context(data_check)
        new_run_weights = None if saved else initial_weights
        open_journal = (
            partial(
                _open_journal,
                config,
                program,
                new_run_weights,
                resumption,
                count_compiled_parameters(program, step.record),
                notify_callbacks,
                stack,
                samples,
                uploads.measure if uploads else _measure_nothing,
                timeline,
            )
            if is_rank_zero
            else partial(_discard_journal, uploads, start)
        )
        profiler = Profiler(directory, run.profile, program.target.platform, run.steps)
        stack.enter_context(profiler.on_signal())
        loop = TrainingLoop(
            run,
            phases,
            frozen,
            checkpoints,
            open_journal,
            notify_callbacks,
            start,
            data_check,
            changes,
            stop,
            watchdog,
            timeline,
            history,
            samples,
            tasks,
            SpikeWindow(run.spikes, resumption.info.spikes if saved else None),
            profiler,
            len(rewinds),
        )
        startup.resume_garbage_collection()
        timeline.begin(start, programs.compile_seconds, str(program.target))
        with watchdog.reporting_errors():
            try:
                summary = loop.run_steps(
                    state, evaluate_first=evaluation_owed, score_first=scores_owed
                )
            except RewindRun as rewind:
                if stop.should_stop():
                    return _stopped_while_loading(stop, directory, start, timeline)
                timeline.end(str(rewind))
                if is_rank_zero:
                    warnings.warn(f"{rewind}; {directory / SPIKES_NAME} says why", stacklevel=1)
                return rewind.with_traceback(None)  # which would hold the state
            timeline.move(activities.SAVE)
            finish_uploads(run, uploads, watchdog, summary.steps)
            is_shared = shares_directory(disks)
            summary = finish_export(
                run, summary, watchdog, log.note, lambda: stop.signal, is_shared=is_shared
            )
        if summary.stopped_by:
            timeline.end(f"stopped by {summary.stopped_by}")
        return summary


def needed_graphs(run: Run, *, resuming: bool, has_average: bool = False) -> list[str]:
    """Return the graphs that a run executes: a resumed one needs no initial state."""
    evaluations = ["evaluate", *([EVALUATE_AVERAGED] if has_average else [])]
    return [
        *([] if resuming else ["init"]),
        "train",
        *(evaluations if run.data.validation is not None else []),
        *(VERIFICATION_GRAPHS if run.verify_every else ()),
    ]


def _stopped_while_loading(
    stop: StopRequest, directory: Path, start: int, timeline: Timeline
) -> RunSummary:
    """Return the outcome of a run that is asked to stop before its first step."""
    assert stop.signal is not None
    timeline.end(f"stopped by {stop.signal.name}")
    return RunSummary(directory, start, start or None, None, stop.signal.name)


def _load_programs(
    phases: Sequence[TrainingPhase],
    first: int,
    cache: Cache,
    names: Sequence[str],
    compile_hint: str,
    stack: ExitStack,
    timeline: Timeline,
) -> tuple[list[LoadedPrograms], startup.MemoryPrefault]:
    """Open the programs of a run, the same on all ranks, while the memory is preallocated.

    Args:
        phases: Phases of the run.
        first: Index of the phase with which it begins, one of whose programs computes the initial
            state.
        cache: Cache with the programs.
        names: Names of the graphs of the first phase.
        compile_hint: Command that compiles missing ones.
        stack: Ends the preallocation.
        timeline: Is told when the devices are initialized.
    """
    other_names = [name for name in names if name != "init"]
    programs = on_all_ranks(
        lambda: [
            LoadedPrograms(
                phase.program, cache, names if index == first else other_names, compile_hint
            )
            for index, phase in enumerate(phases)
        ]
    )
    for one in programs:
        check_same_executables(one)
    prefault = _preallocate_memory(programs, phases[0].program.target)
    stack.callback(prefault.stop)
    timeline.move(activities.DEVICES)
    target = phases[0].program.target
    lowering.backend(target).devices(target)
    timeline.move(activities.LOAD)
    if distributed.count() > 1:  # a failure to load on one rank ends all, before any computes
        on_all_ranks(programs[first].load_all)
    return programs, prefault


def _open_engine(
    config: Config,
    program: ResolvedProgram,
    initial_weights: InitialWeights | None,
    cache: Cache,
    compile_hint: str,
) -> TrainingEngine | None:
    """Return the programs of run.samples and run.tasks; None if neither is set."""
    purpose = purpose_while_training(config.run)
    if purpose is None:
        return None
    from graphtrain.run.training_engine import TrainingEngine

    base = None
    if program.adapter is not None:
        assert initial_weights is not None
        base = initial_weights.source
    return TrainingEngine(program, base, cache, purpose, compile_hint)


def _open_samples(config: Config, engine: TrainingEngine | None) -> TrainingSamples | None:
    """Return what writes run.samples; None if it is not set."""
    if config.run.samples is None:
        return None
    from graphtrain.run.training_samples import TrainingSamples

    assert engine is not None
    return TrainingSamples(config, engine)


def _open_tasks(
    config: Config, engine: TrainingEngine | None, stack: ExitStack
) -> TrainingTasks | None:
    """Return what evaluates run.tasks; None if it is not set."""
    tasks = config.run.tasks
    if tasks is None:
        return None
    with optional_import("run.tasks"):
        from graphtrain.run.training_tasks import TrainingTasks, open_tasks
    assert engine is not None
    directory = tempfile.TemporaryDirectory(prefix="graphtrain-tasks-", ignore_cleanup_errors=True)
    scratch = Path(stack.enter_context(directory))
    return TrainingTasks(*open_tasks(config, tasks, engine.context_length, scratch), engine)


def _open_checkpoints(
    program: ResolvedProgram,
    run: Run,
    stack: ExitStack,
    uploads: Uploads | None,
    disks: HostDisks | None,
    watchdog: Watchdog,
) -> Checkpoints:
    settings = run.checkpoints
    place = Path(run.directory) / "checkpoints"
    retention = Retention(settings.keep, settings.keep_best, settings.keep_every)
    order, steps_in_use = layer_order_of(program), uploads.steps_in_use if uploads else set
    if disks is None:
        checkpoints = Checkpoints(place, retention, order, steps_in_use=steps_in_use)
    else:
        from graphtrain.checkpoints.tiered import TieredCheckpoints

        checkpoints = TieredCheckpoints(
            place,
            retention,
            order,
            tier=disks.tier,
            peers=disks.peers,
            peer_steps=disks.steps,
            whole_every=settings.remote_every,
            copies=bool(settings.copies),
            uploads=disks.uploads,
            steps_in_use=steps_in_use,
            run_long=partial(on_all_ranks_long, wait=lambda: watchdog.move(LOADING)),
        )
    stack.callback(checkpoints.close)
    return checkpoints


def _restore_position(
    loader: Any, restored: RestoredState, changes: Sequence[dict[str, Any]], start: int
) -> None:
    """Move the loader to the position of a checkpoint; in other data, to the same step."""
    position = restored.data_position
    if data_changed(changes, start):
        loader.restore(loader.state() | {"step": position["step"]})
    elif batch_changed(changes, start):
        loader.continue_from(position)
    else:
        loader.restore(position)


def _leave_out(loader: Any, rewinds: Sequence[dict[str, Any]], directory: Path) -> None:
    """Leave out the batches from which the run was rewound to its checkpoint.

    Raises:
        TrainingError: they were of other data.
    """
    try:
        for position in rewinds:
            loader.leave_out(position)
    except DataError as error:
        raise TrainingError(
            f"{directory / SPIKES_NAME}: the run was rewound, and the batches to leave out are of "
            f"other data ({error}); restore the setting, or move the file away to train on them"
        ) from None


def _preallocate_memory(
    programs: Sequence[LoadedPrograms], target: Target
) -> startup.MemoryPrefault:
    """Start to allocate the peak memory of a CPU run, in parallel to the import of JAX."""
    local_devices = target.devices // (target.processes or 1) if target.platform == "cpu" else 0
    peak_bytes = max(one.peak_bytes() for one in programs)
    return startup.MemoryPrefault(peak_bytes * local_devices)


def _init_state(programs: LoadedPrograms, seed: int) -> Tree:
    """Start to compute the initial state with random weights; meanwhile load the train graph."""
    state = programs["init"](np.uint32(seed))["state"]
    programs["train"]
    return state


def _copy_hf_files(config: Config, initial_weights: InitialWeights | None) -> None:
    """Copy the tokenizer and the Hugging Face files of the weights into the run directory.

    graphtrain convert graphtrain-to-hf exports them with the trained weights.
    """
    from graphtrain.weights.hf_record import record_hf_files, verify_hf_files
    from graphtrain.weights.sources import HF_FILES
    from graphtrain.weights.tokenizer import copy_tokenizer

    run = config.run
    directory = Path(run.directory)
    verify_hf_files(directory)
    if initial_weights is not None:
        initial_weights.save_run_files(directory)
    with write_errors(directory):
        copy_tokenizer(run.data.local.train_datasets[0], directory / HF_FILES)
        record_hf_files(directory)


def _open_journal(
    config: Config,
    program: ResolvedProgram,
    initial_weights: InitialWeights | None,
    resumption: Resumption,
    parameters: ParameterCount,
    notify_callbacks: Notify,
    stack: ExitStack,
    samples: TrainingSamples | None,
    measure: Callable[[int], Record],
    timeline: Timeline,
) -> tuple[Report, JournalPosition]:
    """Write config.toml, its record and the Hugging Face files, and open the journal of metrics.

    Called only after the first step has been started, when the run can no longer be refused.
    """
    directory, start = Path(config.run.directory), resumption.start
    if resumption.fresh and (earlier := set_aside(directory)):
        warnings.warn(f"moved the earlier run to {earlier}", stacklevel=1)
    if not start and (message := set_metrics_aside(directory)):
        warnings.warn(message, stacklevel=1)
    info = resumption.info if start else None
    if info is not None and (note := schedule_note(config.run, info.identity, start)):
        warnings.warn(note, stacklevel=1)
    with write_errors(directory):
        write_run_config(directory, render(config), start)
    _copy_hf_files(config, initial_weights)
    timeline.open(directory)
    journal = Journal(
        directory,
        after=start,
        tensorboard=config.run.tensorboard,
        written=info.journal if info else None,
    )
    stack.callback(journal.close)
    if samples is not None:
        samples.open(after=start, write_text=journal.write_text)
    on_fewer = program if str(program.target) != config.program.target else None
    notify_callbacks("on_run_start", RunStart(config, directory, start, parameters, on_fewer))

    def write(record: Record) -> None:
        if "loss" in record:
            record = {**record, **measure(int(record["step"] or 0))}
        record = journal.write(record)
        event = "on_step" if "loss" in record else "on_evaluate"
        metrics = {name: value for name, value in record.items() if name != "step"}
        notify_callbacks(event, record["step"], metrics)

    return write, journal.position


def _measure_nothing(step: int) -> Record:
    """Return no metrics."""
    return {}


def _discard_journal(uploads: Uploads | None, start: int) -> tuple[Report, JournalPosition]:
    """Return functions that discard records: metrics are equal on all ranks, rank 0 writes."""
    if uploads is not None:
        uploads.begin(start)
    return lambda record: None, lambda: None


def _open_data(run: Run, phase: TrainingPhase, placement: BatchPlacement) -> Any:
    """Check the validation set, then return the training data loader of a phase."""
    program = phase.program.settings

    def open_loader() -> Any:
        if run.data.validation is not None:
            from graphtrain.run.evaluate import check_validation

            batches = run_validation_batches(run, program)  # opens it on every rank
            if distributed.rank() == 0:
                check_validation(batches, program)
        return training_loader(run, program, placement.rows)

    return on_all_ranks(open_loader)


def is_evaluation_owed(run: Run, start: int) -> bool:
    """Return whether the evaluation after step `start` is due, but the journal has no result.

    A run that is stopped during an evaluation gives it up. All ranks decide as rank 0 does.
    """
    if run.data.validation is None or not is_evaluation_due(run, start):
        return False
    journal = read_journal(Path(run.directory)) if distributed.rank() == 0 else []
    is_recorded = any(record["step"] == start and "validation_loss" in record for record in journal)
    return not distributed.all_gather_text("recorded" if is_recorded else "")[0]


def are_scores_owed(run: Run, start: int) -> bool:
    """Return whether the scores after step `start` are due, but the journal has none."""
    if not are_scores_due(run, start):
        return False
    journal = read_journal(Path(run.directory)) if distributed.rank() == 0 else []
    is_recorded = any(record["step"] == start and has_scores(record) for record in journal)
    return not distributed.all_gather_text("recorded" if is_recorded else "")[0]


def _record_measurements(
    run: Run, cache: Cache, phases: PhaseSequence, start: int, baseline_bytes: int
) -> None:
    """Record the measured time and memory in the ledger, however the run ended.

    The ledger calibrates the estimates of graphtrain plan. A failure to write it is a warning.
    """
    steps = [record for record in read_journal(Path(run.directory)) if record["step"] > start]
    of_phases = [
        (one, of_phase)
        for one in phases.phases
        if (of_phase := [record for record in steps if one.phase.holds(record["step"])])
    ]
    for one, of_phase in of_phases:
        # The peak memory is that of the largest phase, which is not known.
        _record_phase(run, cache, one, of_phase, baseline_bytes if len(of_phases) == 1 else None)


def _record_phase(
    run: Run,
    cache: Cache,
    phase: PhasePrograms,
    steps: Sequence[dict[str, Any]],
    baseline_bytes: int | None,
) -> None:
    from graphtrain.planning.measured import record_run

    program = phase.phase.program
    if sizes_unknown(program.settings):
        return
    target = program.target
    peak = lowering.backend(target).peak_memory()
    # CPU devices share the memory of the process, part of which was in use before training.
    device_bytes = peak
    if baseline_bytes is None or run.samples is not None or run.tasks is not None:
        device_bytes = None  # samples and tasks may take more than the step
    elif target.runs_on_cpu:
        device_bytes = (peak - baseline_bytes) / target.devices
    try:
        record_run(cache.root, program, phase.programs["train"].record, steps, device_bytes)
    except (OSError, ShardingError) as error:
        warnings.warn(
            f"the measurements of this run were not recorded in the ledger of the cache: {error}",
            stacklevel=1,
        )
