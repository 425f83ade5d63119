"""Train, evaluate, and read the metrics of a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from graphtrain.api.checks.purpose import evaluation_purpose, run_purpose
from graphtrain.api.configuration import (
    Observer,
    Settings,
    checked_config,
    load_config,
    log,
    name_of,
    observe_nothing,
    open_cache,
)
from graphtrain.api.programs import compile_missing

if TYPE_CHECKING:
    from graphtrain.api.configuration import Source
    from graphtrain.checkpoints.steps import StepName
    from graphtrain.config.schema import Config
    from graphtrain.run.callbacks import Callback
    from graphtrain.run.evaluate import Evaluation
    from graphtrain.run.events import RunSummary
    from graphtrain.run.goodput.account import Goodput
    from graphtrain.run.metric_columns import Metrics
    from graphtrain.run.profiles.account import Profile

_COMPILE = "graphtrain.compile(...) with the same configuration"
_SEARCH_AND_COMPILE = "graphtrain.train(..., search=True, compile=True)"


def train(
    config: Source,
    *,
    callbacks: Sequence[Callback] = (),
    target: str | None = None,
    set: Settings = (),
    cache: str | os.PathLike[str] | None = None,
    compile: bool = False,
    search: bool = False,
    allow_change: Sequence[str] = (),
    fresh: bool = False,
    coordinator: str | None = None,
    processes: int | None = None,
    rank: int | None = None,
    compile_hint: str | None = None,
    observe: Observer = observe_nothing,
    log: Callable[[str], None] = log,
    started_at: float | None = None,
) -> RunSummary:
    """Train from compiled programs, and from the last checkpoint if there is one.

    Ctrl-C and SIGTERM save a checkpoint and stop; the summary says so. The same call resumes.

    Args:
        config: A configuration, in any form that load_config accepts.
        callbacks: Objects with methods of `Callback`.
        target: Machine to run on, in place of program.target.
        set: Settings to change.
        cache: Directory of compiled programs; None for $GRAPHTRAIN_CACHE, else ./cache.
        compile: Whether to compile missing programs first, in place of MissingProgram.
        search: Train with the strategy of the run so far or, of a new run, of the last search, in
            place of that of the configuration; with `compile`, search first if nothing was
            searched. Only for runs of one process.
        allow_change: Settings that may differ from those of the checkpoint.
        fresh: Start at step 0; a run in the directory is moved to its folder earlier/N.
        coordinator: Address of rank 0, host:port, if the run has several processes.
        processes: Number of processes of the run.
        rank: Rank of this process, from 0.
        compile_hint: What compiles missing programs, for the error message.
        observe: Called with the progress of compilations.
        log: Called with what is fetched from a remote cache; by default the logger "graphtrain".
        started_at: Unix time from which goodput counts this start; None for the time of the call.

    Raises:
        MissingProgram: a program is not compiled, or no strategy was searched.
        CompilationFailed: a program was to be compiled, and could not be.
        CallbackError: a callback raised an exception.
        UserError: something else that the user can change; its text says what.
    """
    from graphtrain.api.checks.fallback import check_hosts, on_hosts
    from graphtrain.compile.shared_cache import pull_requests
    from graphtrain.compile.tasks import run_tasks
    from graphtrain.run.goodput import activities
    from graphtrain.run.goodput.timeline import Timeline
    from graphtrain.run.processes import expected_count, expected_rank, join_run

    timeline, expected = Timeline(started_at), expected_count(coordinator, processes, rank)
    if search:
        if compile:
            timeline.move(activities.COMPILE)
        config = _searched(config, expected, compile, target, set, cache, fresh, observe, log)
        set, target = (), None
    checked = checked_config(
        config,
        run_purpose(fresh=fresh, compiles=compile),
        set=set,
        target=target,
        allow_change=allow_change,
        rank=expected_rank(coordinator, processes, rank),
    )
    settings, store = checked.config, open_cache(cache)
    check_hosts(settings, expected)
    fewer = [count for count in settings.run.fallback if count < expected]

    def prepare(count: int) -> None:
        timeline.move(activities.COMPILE)
        program = on_hosts(settings, count)
        if count < expected and expected_rank(coordinator, processes, rank) == 0:
            log(f"only {count} of {expected} processes have joined: trains on {program.target}")
        if compile:
            name = name_of(checked.source)
            compile_missing(
                settings, program=program, name=name, cache=cache, observe=observe, log=log
            )
            return
        tasks = run_tasks({"run": program}, {"run": settings.run})
        pull_requests(store, [task.request for task in tasks], log)

    timeline.move(activities.JOIN)
    started = on_hosts(settings, expected).target
    limits = settings.run.watchdog
    hosts = join_run(started, limits, coordinator, processes, rank, prepare, fewer)
    program = on_hosts(settings, hosts)
    timeline.move(activities.PREPARE)
    from graphtrain.run.train import train as train_program

    return train_program(
        program,
        settings.run,
        store,
        configured=settings.program,
        compile_hint=compile_hint or (_SEARCH_AND_COMPILE if search else _COMPILE),
        callbacks=callbacks,
        allowed_changes=allow_change,
        fresh=fresh,
        timeline=timeline,
    )


def _searched(
    config: Source,
    processes: int,
    compile: bool,
    target: str | None,
    set: Settings,
    cache: str | os.PathLike[str] | None,
    fresh: bool,
    observe: Observer,
    log: Callable[[str], None],
) -> Config:
    """Return a configuration with the strategy of its run or of its last search.

    Raises:
        TrainingError: there are several processes.
        MissingProgram: nothing was searched, and nothing may be compiled.
    """
    from graphtrain.api.strategy import searched_config
    from graphtrain.errors import TrainingError

    if processes > 1:
        raise TrainingError(
            "search=True is for runs of one process: on several hosts, each could find another "
            "strategy. Write the strategy into a configuration (graphtrain plan search CONFIG "
            "--output searched.toml), and train with that on every host"
        )
    return searched_config(
        config,
        compile=compile,
        target=target,
        set=set,
        cache=cache,
        fresh=fresh,
        hint=_SEARCH_AND_COMPILE,
        observe=observe,
        log=log,
    )


def evaluate(
    run: Source,
    *,
    step: StepName = "last",
    bigram: bool = False,
    target: str | None = None,
    set: Settings = (),
    cache: str | os.PathLike[str] | None = None,
    coordinator: str | None = None,
    processes: int | None = None,
    rank: int | None = None,
    compile_hint: str = _COMPILE,
) -> Evaluation:
    """Return the mean loss of a checkpoint on the entire validation set, in nats per token.

    For a run without checkpoints, it is that of the weights that it would start from.

    Args:
        run: Directory or summary of a run, or its configuration in any form.
        step: Step of the checkpoint, "last", or "best", that of the lowest validation loss.
        bigram: Whether to measure a bigram model of the training data too.
        target: Machine to run on, in place of program.target.
        set: Settings to change.
        cache: Directory of compiled programs; None for $GRAPHTRAIN_CACHE, else ./cache.
        coordinator: Address of rank 0, host:port, if there are several processes.
        processes: Number of processes.
        rank: Rank of this process, from 0.
        compile_hint: What compiles a missing program, for the error message.

    Raises:
        MissingProgram: the evaluation step is not compiled.
        UserError: something else that the user can change; its text says what.
    """
    from dataclasses import replace

    from graphtrain.checkpoints.steps import named_step
    from graphtrain.config.resolve import resolve
    from graphtrain.run.evaluate import bigram_loss, checkpoint_loss, verify_data
    from graphtrain.run.processes import expected_rank, is_rank_zero, join_run

    purpose = evaluation_purpose(bigram=bigram)
    known = expected_rank(coordinator, processes, rank)
    settings = checked_config(run, purpose, set=set, target=target, rank=known).config
    program = resolve(settings.program)
    join_run(program.target, settings.run.watchdog, coordinator, processes, rank)
    chosen = named_step(Path(settings.run.directory) / "checkpoints", step)
    verify_data(settings.run, bigram=bigram)
    result = checkpoint_loss(
        program, settings.run, open_cache(cache), compile_hint=compile_hint, step=chosen
    )
    if bigram and is_rank_zero():
        return replace(result, bigram_loss=bigram_loss(settings))
    return result


def metrics(run: Source) -> Metrics:
    """Return the metrics of a run as columns.

    Args:
        run: Directory or summary of a run, or its configuration or project in any form.

    Raises:
        TrainingError: the run has no metrics.
    """
    from graphtrain.run.metric_columns import read_metrics

    return read_metrics(directory_of(run))


def goodput(run: Source) -> Goodput:
    """Return where the wall time of a run went, over all of its starts; also while it trains.

    Args:
        run: Directory or summary of a run, or its configuration or project in any form.

    Raises:
        TrainingError: the run has recorded nothing.
    """
    from graphtrain.run.goodput.account import read_goodput

    return read_goodput(directory_of(run))


def profile(
    run: Source,
    *,
    steps: str | None = None,
    target: str | None = None,
    set: Settings = (),
) -> Profile:
    """Return the measured time of each operation of a traced step, with what its plan predicts.

    Args:
        run: Directory or summary of a run, or its configuration or project in any form.
        steps: Steps of the profile, "FIRST:LAST"; None for the last ones.
        target: Machine of the profile, if it is not that of the configuration.
        set: Settings to change.

    Raises:
        TrainingError: the run has no such profile, or it is damaged or of another program.
    """
    from graphtrain.config.phases import program_of_step
    from graphtrain.config.resolve import resolve
    from graphtrain.run.profiles.account import joined_profile
    from graphtrain.run.profiles.files import read_profile

    directory = directory_of(run)
    first_step = read_profile(directory, steps)[0].facts.first_step
    program = resolve(load_config(run, set=set, target=target).program)
    return joined_profile(directory, program_of_step(program, first_step), steps)


def directory_of(run: Source) -> Path:
    """Return the directory of a run, which may have been moved since it was trained."""
    from graphtrain.config.load import run_directory

    if isinstance(run, str | os.PathLike) and Path(run).is_dir():
        return run_directory(Path(run))
    return getattr(run, "directory", None) or Path(load_config(run).run.directory)
