"""Plan and compile the programs of configurations."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, overload

from graphtrain.api.checks.purpose import PLAN, compile_purpose
from graphtrain.api.configuration import (
    Observer,
    Settings,
    checked_config,
    log,
    name_of,
    observe_nothing,
    open_cache,
)

if TYPE_CHECKING:
    from graphtrain.api.checks.checked import CheckedConfig
    from graphtrain.api.configuration import Source
    from graphtrain.compile.tasks import CompilationReport
    from graphtrain.config.resolve import ResolvedProgram
    from graphtrain.config.schema import Config
    from graphtrain.graphs.names import PlannedPurpose, Purpose, ServingPurpose
    from graphtrain.planning.answer import Answer
    from graphtrain.planning.serving import ServingAnswer


@overload
def plan(
    config: Source,
    *,
    target: str | None = None,
    set: Settings = (),
    cache: str | os.PathLike[str] | None = None,
    compile: bool = True,
    confirm: bool = True,
    purpose: Literal["train"] = "train",
    observe: Observer = observe_nothing,
) -> Answer: ...
@overload
def plan(
    config: Source,
    *,
    target: str | None = None,
    set: Settings = (),
    cache: str | os.PathLike[str] | None = None,
    compile: bool = True,
    confirm: bool = True,
    purpose: ServingPurpose,
    observe: Observer = observe_nothing,
) -> ServingAnswer: ...
def plan(
    config: Source,
    *,
    target: str | None = None,
    set: Settings = (),
    cache: str | os.PathLike[str] | None = None,
    compile: bool = True,
    confirm: bool = True,
    purpose: PlannedPurpose = "train",
    observe: Observer = observe_nothing,
) -> Answer | ServingAnswer:
    """Return the memory, communication and time of each device.

    Args:
        config: A configuration, in any form that load_config accepts.
        target: Machine to compile for, in place of program.target.
        set: Settings to change.
        cache: Directory of compiled programs; None for $GRAPHTRAIN_CACHE, else ./cache.
        compile: Whether to compile the programs, in place of estimates.
        confirm: Whether to compile the changes that would make a step fit that does not, or the
            program that needs most with the largest number of slots.
        purpose: "train", one training step; or "generate" one sequence, a "batch" of many,
            "evaluate" tasks, or "serve".
        observe: Called with the progress of compilations.

    Raises:
        UserError: the configuration is wrong, or the rules cannot split an array.
    """
    from graphtrain.config.resolve import resolve

    checked = checked_config(config, PLAN, set=set, target=target)
    program, store = resolve(checked.config.program), open_cache(cache)
    if purpose != "train":
        from graphtrain.planning.serving import answer_serving

        return answer_serving(
            program, purpose, store, compile=compile, confirm=confirm, observe=observe
        )
    from graphtrain.planning.answer import answer

    def vary(change: Sequence[str]) -> ResolvedProgram:
        return resolve(checked.vary(change).program)

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
    purpose: Purpose = "train",
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
        purpose: "train" (and evaluate), "generate" one sequence, "batch" for generate_batch,
            "evaluate" for evaluate_tasks, "serve", or "dump" for the arrays of program.dump.
        observe: Called with the progress of compilations.

    Raises:
        CompilationFailed: a graph failed; the others are stored. Its `report` has every outcome.
        UserError: a configuration is wrong.
    """
    report = compile_report(
        [
            checked_config(config, compile_purpose(purpose), set=set, target=target)
            for config in configs
        ],
        cache=cache,
        jobs=jobs,
        memory=memory,
        timeout=timeout,
        retries=retries,
        retry_failed=retry_failed,
        purpose=purpose,
        observe=observe,
    )
    report.raise_if_failed()
    return report


def compile_report(
    configs: Sequence[CheckedConfig],
    *,
    cache: str | os.PathLike[str] | None,
    jobs: int | None,
    memory: int | None,
    timeout: float | None,
    retries: int,
    retry_failed: bool,
    purpose: Purpose,
    observe: Observer,
    log: Callable[[str], None] = log,
) -> CompilationReport:
    """Compile as compile() does; graphs that failed are in the report."""
    from graphtrain.api.checks.fallback import fallback_programs
    from graphtrain.compile.driver import compile_tasks
    from graphtrain.compile.shared_cache import pull_requests
    from graphtrain.compile.tasks import Limits, run_tasks, tasks_of
    from graphtrain.config.resolve import resolve

    named = {name: checked.config for name, checked in _named(configs).items()}
    programs = {name: resolve(config.program) for name, config in named.items()}
    runs = {name: config.run for name, config in named.items()}
    store = open_cache(cache)
    is_run = purpose == "train"
    smaller = {name: fallback_programs(config) for name, config in named.items()} if is_run else {}
    tasks = run_tasks(programs, runs, smaller) if is_run else tasks_of(programs, purpose)
    pull_requests(store, [task.request for task in tasks], log)
    limits = Limits(jobs, memory, timeout, retries)
    return compile_tasks(tasks, store, limits, retry_failed=retry_failed, observe=observe)


def compile_missing(
    config: Config,
    *,
    program: ResolvedProgram | None = None,
    name: str = "configuration",
    cache: str | os.PathLike[str] | None = None,
    purpose: Literal["train", "dump"] = "train",
    observe: Observer = observe_nothing,
    log: Callable[[str], None] = log,
) -> None:
    """Compile the graphs of a run, or of a dump, that neither cache nor remote cache has.

    The program is that of the configuration, or one of its run.fallback.

    Raises:
        CompilationFailed: a graph failed, or its compiler is not installed.
    """
    from graphtrain.compile.driver import compile_tasks
    from graphtrain.compile.shared_cache import pull_requests
    from graphtrain.compile.tasks import run_tasks, tasks_of
    from graphtrain.config.resolve import resolve

    store, programs = open_cache(cache), {name: program or resolve(config.program)}
    is_run = purpose == "train"
    tasks = run_tasks(programs, {name: config.run}) if is_run else tasks_of(programs, purpose)
    pull_requests(store, [task.request for task in tasks], log)
    missing = [task.label for task in tasks if not store.contains(task.request)]
    if missing:
        log(f"compiling missing graphs: {', '.join(missing)}")
        compile_tasks(tasks, store, observe=observe).raise_if_failed(or_bundled=True)


def _named(configs: Sequence[CheckedConfig]) -> dict[str, CheckedConfig]:
    """Return configurations by a name that no other has."""
    names = [name_of(config.source) for config in configs]
    return {
        name if names.count(name) == 1 else f"{name} {index}": config
        for index, (name, config) in enumerate(zip(names, configs, strict=True), 1)
    }
