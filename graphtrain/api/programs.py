"""Plan and compile the programs of configurations."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from graphtrain.api.configuration import (
    Observer,
    Settings,
    load_config,
    log,
    name_of,
    observe_nothing,
    open_cache,
    overrides_of,
)

if TYPE_CHECKING:
    from graphtrain.api.configuration import Source
    from graphtrain.compile.tasks import CompilationReport
    from graphtrain.config.resolve import ResolvedProgram
    from graphtrain.config.schema import Config
    from graphtrain.planning.answer import Answer


def plan(
    config: Source,
    *,
    target: str | None = None,
    set: Settings = (),
    cache: str | os.PathLike[str] | None = None,
    compile: bool = True,
    confirm: bool = True,
    observe: Observer = observe_nothing,
) -> Answer:
    """Return the memory, communication and time of each device for the training step.

    Args:
        config: A configuration, in any form that load_config accepts.
        target: Machine to compile for, in place of program.target.
        set: Settings to change.
        cache: Directory of compiled programs; None for $GRAPHTRAIN_CACHE, else ./cache.
        compile: Whether to compile the step, in place of estimates.
        confirm: Whether to compile the changes that would make a step fit that does not.
        observe: Called with the progress of compilations.

    Raises:
        UserError: the configuration is wrong, or the rules cannot split an array.
    """
    from graphtrain.config.resolve import resolve
    from graphtrain.planning.answer import answer

    def vary(change: Sequence[str]) -> ResolvedProgram:
        named_target = [f"program.target={target}"] if target else []
        changed = [*overrides_of(set), *named_target, *change]
        return resolve(load_config(config, set=changed).program)

    program = resolve(load_config(config, set=set, target=target).program)
    store = open_cache(cache)
    return answer(program, vary, store, compile=compile, confirm=confirm, observe=observe)


def compile(
    *configs: Source,
    target: str | None = None,
    set: Settings = (),
    cache: str | os.PathLike[str] | None = None,
    jobs: int | None = None,
    memory: int | None = None,
    timeout: float | None = None,
    retries: int = 1,
    retry_failed: bool = False,
    observe: Observer = observe_nothing,
) -> CompilationReport:
    """Compile every graph of runs into the cache, in worker processes.

    Args:
        configs: Configurations, in any form that load_config accepts.
        target: Machine to compile for, in place of program.target.
        set: Settings to change.
        cache: Directory of compiled programs; None for $GRAPHTRAIN_CACHE, else ./cache.
        jobs: Number of graphs to compile in parallel; None for the number of cores.
        memory: Bytes of host memory for all compilations; None for what is available.
        timeout: Seconds after which the compilation of a graph is stopped.
        retries: Number of further attempts after a compiler process is killed.
        retry_failed: Whether to compile graphs again that this compiler rejected before.
        observe: Called with the progress of compilations.

    Raises:
        CompilationFailed: a graph failed; the others are stored. Its `report` has every outcome.
        UserError: a configuration is wrong.
    """
    report = compile_report(
        configs,
        target=target,
        set=set,
        cache=cache,
        jobs=jobs,
        memory=memory,
        timeout=timeout,
        retries=retries,
        retry_failed=retry_failed,
        observe=observe,
    )
    report.raise_if_failed()
    return report


def compile_report(
    configs: Sequence[Source],
    *,
    target: str | None,
    set: Settings,
    cache: str | os.PathLike[str] | None,
    jobs: int | None,
    memory: int | None,
    timeout: float | None,
    retries: int,
    retry_failed: bool,
    observe: Observer,
    log: Callable[[str], None] = log,
) -> CompilationReport:
    """Compile as compile() does; graphs that failed are in the report."""
    from graphtrain.compile.driver import compile_tasks
    from graphtrain.compile.shared_cache import pull_programs
    from graphtrain.compile.tasks import Limits, tasks_of
    from graphtrain.config.resolve import resolve

    programs = {
        name: resolve(load_config(config, set=set, target=target).program)
        for name, config in _named(configs).items()
    }
    store = open_cache(cache)
    pull_programs(store, programs.values(), log)
    limits = Limits(jobs, memory, timeout, retries)
    return compile_tasks(
        tasks_of(programs), store, limits, retry_failed=retry_failed, observe=observe
    )


def compile_missing(
    config: Config,
    *,
    name: str = "configuration",
    cache: str | os.PathLike[str] | None = None,
    observe: Observer = observe_nothing,
    log: Callable[[str], None] = log,
) -> None:
    """Compile the graphs of a run that neither the cache nor the remote cache has.

    Raises:
        CompilationFailed: a graph failed, or its compiler is not installed.
    """
    from graphtrain.compile.driver import compile_tasks
    from graphtrain.compile.shared_cache import pull_programs
    from graphtrain.compile.tasks import tasks_of
    from graphtrain.config.resolve import resolve

    program, store = resolve(config.program), open_cache(cache)
    pull_programs(store, [program], log)
    tasks = tasks_of({name: program})
    missing = [task.label for task in tasks if not store.contains(task.request)]
    if missing:
        log(f"compiling missing graphs: {', '.join(missing)}")
        compile_tasks(tasks, store, observe=observe).raise_if_failed(or_bundled=True)


def _named(configs: Sequence[Source]) -> dict[str, Source]:
    """Return configurations by a name that no other has."""
    names = [name_of(config) for config in configs]
    return {
        name if names.count(name) == 1 else f"{name} {index}": config
        for index, (name, config) in enumerate(zip(names, configs, strict=True), 1)
    }
