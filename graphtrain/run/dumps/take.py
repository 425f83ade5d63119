"""Dump of a run's next steps, by a training step that was compiled to return arrays."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

import lowering
from graphtrain.cache import Cache
from graphtrain.checkpoints.checkpoint import Checkpoints
from graphtrain.checkpoints.info import check_same_model, read_checkpoint_info
from graphtrain.checkpoints.layer_order import layer_order_of
from graphtrain.checkpoints.output_directory import create_directory, unfinished_name
from graphtrain.checkpoints.pruned import read_checkpoint
from graphtrain.checkpoints.steps import Retention, missing_checkpoint, saved_steps
from graphtrain.config.phases import program_of_step
from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema import Run
from graphtrain.graphs.names import DUMP
from graphtrain.models.lora.trainable import has_frozen_weights
from graphtrain.run.agreement import (
    check_same_checkpoints,
    check_same_executables,
    on_all_ranks,
)
from graphtrain.run.dumps.eager import check_eager
from graphtrain.run.dumps.files import StoredDump
from graphtrain.run.dumps.steps import StartingState, StepDumper
from graphtrain.run.initial_weights import InitialWeights, load_initial_weights
from graphtrain.run.phases import PhasePrograms, remaining_phases
from graphtrain.run.programs import LoadedPrograms
from lowering.trees import Tree
from lowering.xla import distributed


def take_dump(
    program: ResolvedProgram,
    run: Run,
    cache: Cache,
    directory: Path,
    *,
    steps: int,
    start: int | None,
    compile_hint: str,
    eager: bool = False,
) -> StoredDump:
    """Run training steps and write the arrays of program.dump of each; the run is not changed.

    With several processes, all call it, and `directory` is on a file system that they share.

    Args:
        program: the program.
        run: settings of the run.
        cache: cache with the compiled programs.
        directory: directory to create.
        steps: number of steps.
        start: step of the checkpoint to start from; 0 for the initial state, None for the last
            checkpoint or, if there is none, the initial state.
        compile_hint: command that compiles the missing programs, for the error message.
        eager: whether eager PyTorch computes the step of an imported model, with the same weights
            and batch.

    Raises:
        MissingProgram: a program is not in the cache.
        DumpError: PyTorch does not repeat the step, the processes do not see one directory, or the
            steps are of phases with other arrays.
        TrainingError: there is no such checkpoint, or it is of another model.
        DataError: the training data cannot be used.
        WeightsError: the directory exists, or the initial weights cannot be used.
    """
    checkpoints = Path(run.directory) / "checkpoints"
    saved = saved_steps(checkpoints)
    check_same_checkpoints(str(checkpoints), saved)
    if start and start not in saved:
        raise missing_checkpoint(checkpoints, saved)
    resumes = bool(saved) if start is None else start > 0
    first = (saved[-1] if start is None else start) if resumes else 0
    if eager:
        check_eager(program_of_step(program, first + 1), steps)
    initial_weights = on_all_ranks(lambda: InitialWeights.open(program, run, resuming=resumes))
    look_up = partial(_phase_programs, program, cache, compile_hint, steps)
    phases = on_all_ranks(lambda: look_up(first, resumes=resumes))
    for one in phases:
        check_same_executables(one.programs)
    programs = phases[0].programs
    with ExitStack() as stack:
        unfinished = on_all_ranks(lambda: _create(directory, stack))
        with lowering.backend(program.target).forbid_tracing():
            if resumes:
                # Several processes restore one step, also if the run saves another one meanwhile.
                step = first if distributed.count() > 1 else start
                begin = _restored(program, checkpoints, step, programs[DUMP].inputs("state"))
                if begin.step != first:  # the run deleted that checkpoint meanwhile
                    phases = look_up(begin.step, resumes=True)
            else:
                begin = _new(programs, run, initial_weights)
            frozen = ()
            if initial_weights is not None and has_frozen_weights(program.settings):
                inputs = programs[DUMP].inputs
                trained = inputs("state")["parameters"]
                frozen = (initial_weights.frozen(inputs("frozen"), trained),)
            dumper = StepDumper(program, run, frozen, unfinished, eager=eager)
            dumper.write_steps(phases, begin, steps)
        on_all_ranks(stack.close)
    return StoredDump.open(directory)


def _phase_programs(
    program: ResolvedProgram,
    cache: Cache,
    compile_hint: str,
    steps: int,
    begin: int,
    *,
    resumes: bool,
) -> list[PhasePrograms]:
    """Look up the programs of the phases of `steps` steps after `begin`.

    Raises:
        MissingProgram: one is not in the cache.
    """
    phases = remaining_phases(program, begin + steps, begin)
    names = [[DUMP] if resumes or number else ["init", DUMP] for number in range(len(phases))]
    return [
        PhasePrograms(phase, LoadedPrograms(phase.program, cache, needed, compile_hint), {})
        for phase, needed in zip(phases, names, strict=True)
    ]


def _create(directory: Path, stack: ExitStack) -> Path:
    """Create the directory on rank 0; it gets its name if the stack is closed without an error."""
    if distributed.rank() == 0:
        return stack.enter_context(create_directory(directory))
    return unfinished_name(directory)


def _restored(
    program: ResolvedProgram, directory: Path, step: int | None, described: Tree
) -> StartingState:
    """Return the state of a checkpoint; None for the last."""

    def read(step: int | None) -> StartingState:
        assert step is not None
        info = read_checkpoint_info(directory, step)
        check_same_model(directory / str(step), info, program_of_step(program, step).settings)
        checkpoints = Checkpoints(directory, Retention(1), layer_order_of(program))
        try:
            restored = checkpoints.restore(step, described)
        finally:
            checkpoints.close()
        return StartingState(step, restored.state, restored.data_position)

    return read_checkpoint(directory, step, read)[1]


def _new(
    programs: LoadedPrograms, run: Run, initial_weights: InitialWeights | None
) -> StartingState:
    """Return the state of a run before its first step."""
    state = programs["init"](np.uint32(run.seed))["state"]
    if initial_weights is not None:
        described = programs[DUMP].inputs("state")
        state = load_initial_weights(initial_weights, described, state)
    return StartingState(0, state, None)
