"""Opening of a run before its first step: programs, checkpoints, data, samples and tasks."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import lowering
from graphtrain.cache import Cache
from graphtrain.checkpoints.checkpoint import Checkpoints, RestoredState
from graphtrain.checkpoints.layer_order import layer_order_of
from graphtrain.checkpoints.steps import Retention
from graphtrain.config.phases import TrainingPhase
from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema import Config, Run
from graphtrain.errors import DataError, TrainingError
from graphtrain.graphs.names import (
    EVALUATE_AVERAGED,
    VERIFICATION_GRAPHS,
    purpose_while_training,
)
from graphtrain.run.agreement import check_same_executables, on_all_ranks, on_all_ranks_long
from graphtrain.run.batch_placement import BatchPlacement
from graphtrain.run.goodput import activities
from graphtrain.run.goodput.timeline import Timeline
from graphtrain.run.initial_weights import InitialWeights
from graphtrain.run.periodic_evaluations import run_validation_batches
from graphtrain.run.programs import LoadedPrograms
from graphtrain.run.resume import batch_changed, data_changed
from graphtrain.run.spikes import NAME as SPIKES_NAME
from graphtrain.run.stalls import LOADING
from graphtrain.run.training_data import training_loader
from graphtrain.run.watchdog import Watchdog
from lowering.machine import startup
from lowering.machine.extras import optional_import
from lowering.machine.target import Target
from lowering.trees import Tree
from lowering.xla import distributed

if TYPE_CHECKING:
    from graphtrain.run.host_disks import HostDisks
    from graphtrain.run.training_engine import TrainingEngine
    from graphtrain.run.training_samples import TrainingSamples
    from graphtrain.run.training_tasks import TrainingTasks
    from graphtrain.run.uploads import Uploads


def needed_graphs(run: Run, *, resuming: bool, has_average: bool = False) -> list[str]:
    """Return the graphs that a run executes: a resumed one needs no initial state."""
    evaluations = ["evaluate", *([EVALUATE_AVERAGED] if has_average else [])]
    return [
        *([] if resuming else ["init"]),
        "train",
        *(evaluations if run.data.validation is not None else []),
        *(VERIFICATION_GRAPHS if run.verify_every else ()),
    ]


def load_programs(
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


def _preallocate_memory(
    programs: Sequence[LoadedPrograms], target: Target
) -> startup.MemoryPrefault:
    """Start to allocate the peak memory of a CPU run, in parallel to the import of JAX."""
    local_devices = target.devices // (target.processes or 1) if target.platform == "cpu" else 0
    peak_bytes = max(one.peak_bytes() for one in programs)
    return startup.MemoryPrefault(peak_bytes * local_devices)


def init_state(programs: LoadedPrograms, seed: int) -> Tree:
    """Start to compute the initial state with random weights; meanwhile load the train graph."""
    state = programs["init"](np.uint32(seed))["state"]
    programs["train"]
    return state


def open_engine(
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


def open_samples(config: Config, engine: TrainingEngine | None) -> TrainingSamples | None:
    """Return what writes run.samples; None if it is not set."""
    if config.run.samples is None:
        return None
    from graphtrain.run.training_samples import TrainingSamples

    assert engine is not None
    return TrainingSamples(config, engine)


def open_tasks_of_run(
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


def open_checkpoints(
    program: ResolvedProgram,
    run: Run,
    stack: ExitStack,
    uploads: Uploads | None,
    disks: HostDisks | None,
    watchdog: Watchdog,
) -> Checkpoints:
    """Return the checkpoints of a run: in its directory, or in pieces on the disks of the hosts."""
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


def open_data(run: Run, phase: TrainingPhase, placement: BatchPlacement) -> Any:
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


def restore_position(
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


def leave_out(loader: Any, rewinds: Sequence[dict[str, Any]], directory: Path) -> None:
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
