"""Dump arrays of training steps, and compare two dumps."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from graphtrain.api.checks.purpose import dump_purpose
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
    from graphtrain.api.configuration import Source
    from graphtrain.checkpoints.steps import StepName
    from graphtrain.config.schema import Config, Run
    from graphtrain.run.dumps.compare import Comparison
    from graphtrain.run.dumps.files import StoredDump


def dump(
    config: Source,
    directory: str | os.PathLike[str],
    *,
    steps: int = 1,
    step: StepName = "last",
    arrays: Sequence[str] = (),
    summary: bool | None = None,
    torch: bool = False,
    target: str | None = None,
    set: Settings = (),
    cache: str | os.PathLike[str] | None = None,
    compile: bool = False,
    coordinator: str | None = None,
    processes: int | None = None,
    rank: int | None = None,
    compile_hint: str = "graphtrain.compile(..., purpose='dump')",
    observe: Observer = observe_nothing,
    log: Callable[[str], None] = log,
) -> StoredDump:
    """Run training steps and write named activations and gradients of each into a new directory.

    The steps are those that the run would take next. The run itself is not changed. With several
    processes, all call it with one directory, on a file system that they share.

    Args:
        config: A configuration, in any form that load_config accepts, or the directory of a run.
        directory: Directory to create.
        steps: Number of steps.
        step: Step of the checkpoint to start from, or "last" or "best"; 0 for the initial state.
        arrays: Names of arrays, or globs, in place of program.dump.arrays.
        summary: Whether to write only statistics of each array; None: as program.dump.summary.
        torch: Whether eager PyTorch computes the step of an imported model, with the same weights
            and batch, to compare with.
        target: Machine to run on, in place of program.target.
        set: Settings to change.
        cache: Directory of compiled programs; None for $GRAPHTRAIN_CACHE, else ./cache.
        compile: Whether to compile missing programs first, in place of MissingProgram.
        coordinator: Address of rank 0, host:port, if there are several processes.
        processes: Number of processes.
        rank: Rank of this process, from 0.
        compile_hint: What compiles missing programs, for the error message.
        observe: Called with the progress of compilations.
        log: Called with what is fetched from a remote cache.

    Raises:
        MissingProgram: a program is not compiled.
        CompilationFailed: a program was to be compiled, and could not be.
        UserError: something else that the user can change; its text says what.
    """
    from graphtrain.api.programs import compile_missing
    from graphtrain.checkpoints.steps import named_step
    from graphtrain.config.resolve import resolve
    from graphtrain.errors import MissingProgram
    from graphtrain.run.dumps.take import take_dump
    from graphtrain.run.processes import expected_rank, is_rank_zero, join_run

    purpose = dump_purpose(compiles=compile, restores=step != 0)
    known = expected_rank(coordinator, processes, rank)
    checked = checked_config(config, purpose, set=set, target=target, rank=known)
    settings = with_arrays(checked.config, arrays, summary)
    program, store = resolve(settings.program), open_cache(cache)

    def prepare() -> None:
        if compile:
            name = name_of(checked.source)
            compile_missing(
                settings, name=name, cache=cache, purpose="dump", observe=observe, log=log
            )

    limits = settings.run.watchdog
    join_run(program.target, limits, coordinator, processes, rank, lambda _: prepare())
    start = named_step(Path(settings.run.directory) / "checkpoints", step)
    try:
        stored = take_dump(
            program,
            settings.run,
            store,
            Path(directory),
            steps=steps,
            start=start,
            compile_hint=compile_hint,
            eager=torch,
        )
    except MissingProgram:
        array_names(settings)  # a wrong name is the better reason
        raise
    if is_rank_zero():
        _upload(settings.run, Path(directory))
    return stored


def _upload(run: Run, directory: Path) -> None:
    """Upload a dump that is in the folder dumps of its run; a failure is a warning."""
    from graphtrain.checkpoints.file_copies import DUMPS, FileCopies
    from sharding_rules.errors import UserError

    run_directory, place = Path(run.directory).absolute(), run.upload_place
    if place is None or not directory.absolute().is_relative_to(run_directory / DUMPS):
        return
    name = directory.absolute().relative_to(run_directory).as_posix()
    try:
        FileCopies(run_directory, *place).upload_changed(only=f"{name}/")
    except (UserError, OSError) as error:
        warnings.warn(f"run.upload: {directory} is not in {place[0]}: {error}", stacklevel=2)


def with_arrays(config: Config, arrays: Sequence[str], summary: bool | None) -> Config:
    """Return a configuration with other settings of a dump, where they are given."""
    changed = config.program.dump
    if arrays:
        changed = replace(changed, arrays=tuple(arrays))
    if summary is not None:
        changed = replace(changed, summary=summary)
    return replace(config, program=replace(config.program, dump=changed))


def array_names(config: Config) -> list[tuple[str, list[int], list[str]]]:
    """Return name, shape and lines of the arrays that program.dump names; traces the model.

    Raises:
        PlanError: no array has such a name.
    """
    import lowering
    from graphtrain.config.resolve import resolve
    from graphtrain.graphs.build import build_graph
    from graphtrain.graphs.names import DUMP

    program = resolve(config.program)
    lowering.backend(program.target).compile_devices(program.target)  # before other uses of JAX
    facts = build_graph(program, DUMP).facts[DUMP]["arrays"]
    return [(fact["name"], fact["shape"], fact["lines"]) for fact in facts]


def compare(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    tolerance: float | None = None,
    absolute: float = 0.0,
    common: bool = False,
) -> Comparison:
    """Compare two dumps; `first` of the result is the first array that differs.

    `is_equal` says whether everything was compared and is equal; what is not finite in both dumps,
    and what only one has, is not.

    Args:
        a: Directory of the dump to trust.
        b: Directory of the other one.
        tolerance: Relative difference up to which arrays count as equal; None: what rounding in the
            coarser of the two dtypes explains.
        absolute: Differences of at most this count as equal in any case.
        common: Whether arrays and steps that only one dump has do not count.

    Raises:
        DumpError: a directory contains no dump or a damaged one, or the two have nothing in common.
    """
    from graphtrain.run.dumps.compare import compare_dumps
    from graphtrain.run.dumps.files import StoredDump

    opened = StoredDump.open(Path(a)), StoredDump.open(Path(b))
    return compare_dumps(*opened, tolerance=tolerance, absolute=absolute, common=common)
