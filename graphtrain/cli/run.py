"""graphtrain run: train from compiled programs."""

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from graphtrain.cli.options import (
    cache_option,
    compile_hint,
    config_argument,
    is_rank_zero,
    join_run,
    overrides_option,
    process_options,
    pull_shared,
    target_option,
)
from graphtrain.cli.run_progress import progress_reporter
from graphtrain.cli.terminal import say
from lowering.machine import startup

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
    "--allow-change",
    "allowed_changes",
    multiple=True,
    metavar="NAME",
    help="Resume although this setting, or data, differs from the checkpoint. Repeatable.",
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
    allowed_changes: Sequence[str],
) -> None:
    """Train CONFIG from compiled programs, and from the last checkpoint if there is one.

    Nothing is traced or compiled: without --compile, a missing program is an error (status 3).
    SIGTERM and Ctrl-C save a checkpoint and stop; the same command resumes from it.
    """
    startup.pause_garbage_collection()  # until train() takes the first step
    startup.skip_blas_threads()
    from graphtrain.cache import Cache
    from graphtrain.config import load_config
    from graphtrain.config.resolve import resolve

    settings = load_config(config, overrides, target)
    program, run = resolve(settings.program), settings.run
    store = Cache(cache)
    pull_shared(store, [program])
    if compile_missing:
        _compile_missing(config, program, store)
    join_run(program.target, coordinator, count, rank)
    from graphtrain.run.train import train

    remedy = compile_hint(config, target, overrides, cache)
    with progress_reporter(run.steps, run.report_every) as report:
        summary = train(
            program,
            run,
            store,
            compile_hint=remedy,
            on_record=report,
            allowed_changes=allowed_changes,
        )
    if is_rank_zero():
        click.echo(_format_summary(summary, run.directory))
    if summary.stopped_by:
        import signal

        sys.exit(_SIGNAL_STATUS + signal.Signals[summary.stopped_by])
    if is_rank_zero():
        print_curve(Path(run.directory))


def _compile_missing(config: Path, program, store) -> None:
    from graphtrain.cli.compile import print_problems, print_report, progress
    from graphtrain.compile.driver import compile_tasks
    from graphtrain.compile.tasks import tasks_of

    tasks = tasks_of({str(config): program})
    missing = [task.label for task in tasks if not store.contains(task.request)]
    if not missing:
        return
    say(f"compiling missing graphs: {', '.join(missing)}")
    with progress() as observe:
        report = compile_tasks(tasks, store, observe=observe)
    if report.count("failed") or report.count("bundled"):
        print_problems(report)
        print_report(report)
        sys.exit(2)


def _format_summary(summary, directory: str) -> str:
    loss = summary.validation_loss
    loss_text = "" if loss is None else f", validation loss {loss:.4f}"
    if summary.stopped_by and summary.steps == (summary.resumed_from or 0):
        return (
            f"stopped by {summary.stopped_by} before step {summary.steps + 1}; the same command "
            "starts there again"
        )
    if summary.stopped_by:
        return (
            f"stopped by {summary.stopped_by} after step {summary.steps}; saved in {directory}; "
            "the same command resumes from there"
        )
    resumed = "" if summary.resumed_from is None else f" (resumed from {summary.resumed_from})"
    return f"trained {summary.steps} steps{resumed}{loss_text}; saved in {directory}"


def print_curve(directory: Path) -> None:
    """Print the training and validation loss by step as a text chart."""
    from graphtrain.run.loss_curve import loss_curve
    from graphtrain.run.metrics import read_journal

    records = read_journal(directory)
    if len(records) > 1:
        click.echo(loss_curve(records))
