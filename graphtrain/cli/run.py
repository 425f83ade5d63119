"""graphtrain run: train from compiled programs."""

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click

from graphtrain.api.checks.purpose import run_purpose
from graphtrain.api.configuration import observe_nothing
from graphtrain.cli.checked import check
from graphtrain.cli.options import (
    arguments,
    cache_option,
    compile_hint,
    config_argument,
    overrides_option,
    process_options,
    target_option,
)
from graphtrain.cli.run_progress import progress_reporter
from graphtrain.cli.terminal import say
from lowering.machine import host, startup

if TYPE_CHECKING:
    from graphtrain.config.load import Source
    from graphtrain.config.schema import Config, Run
    from graphtrain.run.events import RunSummary

_SIGNAL_STATUS = 128  # plus the signal number, the convention of shells


@click.command("run")
@config_argument
@target_option
@overrides_option
@cache_option
@process_options
@click.option(
    "--compile",
    "compile_missing",
    is_flag=True,
    help="Compile missing graphs first, instead of exiting with 3.",
)
@click.option(
    "--search",
    is_flag=True,
    help="Take the strategy of the run in the directory or, for a new run, the winner of the last "
    "search (graphtrain compile --search, plan search), in place of that of CONFIG. Only for runs "
    "of one process.",
)
@click.option(
    "--allow-change",
    "allowed_changes",
    multiple=True,
    metavar="NAME",
    help="Resume although this setting, or data, differs from the checkpoint. Repeatable.",
)
@click.option(
    "--fresh",
    is_flag=True,
    help="Start at step 0; the run in the directory, if any, is moved to its folder earlier/N.",
)
@click.option(
    "-v", "--verbose", is_flag=True, help="Print a line for every step and every checkpoint."
)
@click.option(
    "-q", "--quiet", is_flag=True, help="Print only warnings, errors and how the run ended."
)
def command(
    config: Path,
    target: str | None,
    overrides: Sequence[str],
    cache: Path,
    coordinator: str | None,
    count: int | None,
    rank: int | None,
    compile_missing: bool,
    search: bool,
    allowed_changes: Sequence[str],
    fresh: bool,
    verbose: bool,
    quiet: bool,
) -> None:
    """Train CONFIG from compiled programs, and from the last checkpoint if there is one.

    Nothing is traced or compiled: without --compile, a missing program, or a strategy that was not
    searched, is an error (status 3).
    SIGTERM and Ctrl-C save a checkpoint and stop; the same command resumes from it.
    """
    if verbose and quiet:
        raise click.UsageError("--verbose and --quiet exclude each other")
    startup.pause_garbage_collection()  # until train() takes the first step
    startup.skip_blas_threads()
    from graphtrain.run.processes import expected_count, expected_rank, is_rank_zero

    this_rank = expected_rank(coordinator, count, rank)
    hint = compile_hint(config, target, overrides, cache)
    source: Source = config
    if search:
        if expected_count(coordinator, count, rank) > 1:
            raise click.UsageError(_several_processes(config, target, overrides))
        hint = f"{hint} --search"
        source = _with_searched_strategy(
            config, overrides, target, cache, fresh, compile_missing, hint, this_rank
        )
    checked = check(
        source,
        () if search else overrides,
        None if search else target,
        run_purpose(fresh=fresh, compiles=compile_missing),
        allowed_changes=allowed_changes,
        rank=this_rank,
    )
    from graphtrain.api.runs import train

    run = checked.config.run
    reporter = progress_reporter(run.steps, run.report_every, verbose=verbose)
    with reported_compilation(), nullcontext() if quiet else reporter as progress:
        summary = train(
            checked,
            callbacks=[] if progress is None else [progress],
            cache=cache,
            compile=compile_missing,
            allow_change=allowed_changes,
            fresh=fresh,
            coordinator=coordinator,
            processes=count,
            rank=rank,
            compile_hint=hint,
            observe=observe_nothing if progress is None else progress.observe,
            log=say,
            started_at=host.process_started_at(),
        )
    if is_rank_zero():
        click.echo(_format_summary(summary, run))
        if summary.exported is not None:
            click.echo(f"exported to {summary.exported}")
    if summary.stopped_by:
        import signal

        sys.exit(_SIGNAL_STATUS + signal.Signals[summary.stopped_by])
    if is_rank_zero() and not quiet and summary.steps != summary.resumed_from:
        print_curve(summary.directory)


def _several_processes(config: Path, target: str | None, overrides: Sequence[str]) -> str:
    """Return why --search is for one process, and what to do with several.

    Each looks in its own cache and run directory before it joins the others, so they could differ.
    """
    words = arguments(config, target, overrides)
    search = shlex.join(["graphtrain", "plan", "search", *words, "--output", "searched.toml"])
    return (
        "--search is for runs of one process: on several hosts, each could find another strategy. "
        f"Write the strategy into a configuration: {search}; then compile searched.toml and start "
        "it on every host (of a run that has begun, the config.toml in its directory)"
    )


def _with_searched_strategy(
    config: Path,
    overrides: Sequence[str],
    target: str | None,
    cache: Path,
    fresh: bool,
    compiles: bool,
    hint: str,
    rank: int,
) -> "Config":
    """Return the configuration with the strategy of --search; rank 0 says which."""
    from graphtrain.api.strategy import searched_config
    from graphtrain.cli.compile import progress

    with progress(is_main=rank == 0) as observe:
        return searched_config(
            config,
            compile=compiles,
            target=target,
            set=overrides,
            cache=cache,
            fresh=fresh,
            hint=hint,
            observe=observe,
            log=say if rank == 0 else lambda line: None,
        )


@contextmanager
def reported_compilation() -> Iterator[None]:
    """Print the report of a compilation that failed, and end with its status."""
    from graphtrain.compile.tasks import CompilationFailed

    try:
        yield
    except CompilationFailed as error:
        from graphtrain.cli.compile import print_problems, print_report

        print_problems(error.report)
        print_report(error.report)
        sys.exit(error.exit_status)


def _format_summary(summary: "RunSummary", run: "Run") -> str:
    """Say in one line how a run ended."""
    directory, start = summary.directory, summary.resumed_from
    if summary.stopped_by and summary.steps == (start or 0):
        return (
            f"stopped by {summary.stopped_by} before step {summary.steps + 1}; the same command "
            "starts there again"
        )
    if summary.stopped_by:
        return (
            f"stopped by {summary.stopped_by} after step {summary.steps}; saved in {directory}; "
            "the same command resumes from there"
        )
    if summary.stopped_early:
        return (
            f"stopped early after step {summary.steps}: no lower validation loss in "
            f"{run.early_stopping_patience} evaluations since step {summary.best_step}; saved in "
            f"{directory}; a higher run.early_stopping_patience trains on"
        )
    if summary.steps == start and summary.validation_loss is None:
        return (
            f"{directory} already has {start} steps; set run.steps to more to train on, or start "
            "again with --fresh"
        )
    loss = summary.validation_loss
    loss_text = "" if loss is None else f", validation loss {loss:.4f}"
    if summary.best_step not in (None, summary.steps):
        loss_text += f" (lowest at step {summary.best_step})"
    resumed = "" if start is None else f" (resumed from {start})"
    return f"trained {summary.steps} steps{resumed}{loss_text}; saved in {directory}"


def print_curve(directory: Path) -> None:
    """Print the training and validation loss by step as a text chart."""
    from graphtrain.run.loss_curve import loss_curve
    from graphtrain.run.metrics import read_journal

    records = read_journal(directory)
    if len(records) > 1:
        click.echo(loss_curve(records))
