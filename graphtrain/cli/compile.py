"""graphtrain compile: compile every graph of a run into the cache, in parallel."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from graphtrain.api.checks.purpose import compile_purpose
from graphtrain.cli.checked import check
from graphtrain.cli.export_note import say_export_obstacle
from graphtrain.cli.options import (
    ConfigPath,
    FiniteRange,
    LocalPath,
    Size,
    cache_option,
    command_line,
    json_option,
    overrides_option,
    target_option,
    write_report,
)
from graphtrain.cli.terminal import say

if TYPE_CHECKING:
    from graphtrain.api.checks.checked import CheckedConfig
    from graphtrain.api.checks.purpose import Purpose as CompilationPurpose
    from graphtrain.compile.tasks import CompilationReport, Observer, TaskOutcome
    from graphtrain.config import Program
    from graphtrain.graphs.names import Purpose


def compile_limit_options(command: Callable) -> Callable:
    """Add the options that limit compilation on this machine and that write the summary."""
    options = (
        click.option(
            "--jobs",
            type=click.IntRange(1),
            help="Number of graphs to compile in parallel. [default: number of cores]",
        ),
        click.option(
            "--memory",
            type=Size(),
            metavar="SIZE",
            help="Host memory for all compilations together, for example 64GB. "
            "[default: memory available at the start]",
        ),
        click.option(
            "--retries",
            type=click.IntRange(0),
            default=1,
            show_default=True,
            help="Number of further attempts after a compiler process is killed.",
        ),
        click.option(
            "--timeout",
            type=FiniteRange(min=0, min_open=True),
            help="Seconds after which the compilation of a graph is stopped. [default: no limit]",
        ),
        click.option(
            "--retry-failed",
            is_flag=True,
            help="Also compile graphs that this compiler version failed to compile before.",
        ),
        click.option(
            "--report",
            type=LocalPath(),
            metavar="FILE",
            help="Write the summary to FILE as JSON.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.command("compile")
@click.argument("configs", nargs=-1, required=True, metavar="CONFIG|RUN...", type=ConfigPath())
@target_option
@overrides_option
@cache_option
@compile_limit_options
@click.option(
    "--for",
    "purpose",
    type=click.Choice(("train", "dump", "generate", "batch", "evaluate", "serve")),
    default="train",
    show_default=True,
    help="What the graphs are for: train and evaluate, dump the arrays of program.dump, generate "
    "one sequence, generate a batch (--prompts), evaluate --tasks, or serve.",
)
@click.option(
    "--search",
    is_flag=True,
    help="Search for the fastest strategy, compile the best ones to choose the winner, and compile "
    "every graph with it; graphtrain run --search starts it.",
)
@click.option(
    "--fallback",
    metavar="N,M,...",
    help="Also compile for these smaller numbers of hosts, not devices, on which a run can be "
    "restarted. Overrides run.fallback, which the run needs too.",
)
@json_option
def command(
    configs: Sequence[Path],
    target: str | None,
    overrides: Sequence[str],
    cache: Path,
    jobs: int | None,
    memory: int | None,
    retries: int,
    timeout: float | None,
    retry_failed: bool,
    report: Path | None,
    purpose: "Purpose",
    search: bool,
    fallback: str | None,
    as_json: bool,
) -> None:
    """Compile every graph of the runs in CONFIGS into the cache. No accelerator is needed.

    Exits with 2 if a graph failed; the other graphs are stored all the same. If neuronx-cc is not
    installed on this machine, graphs for Neuron are written as bundles, which
    graphtrain neuron finish compiles on a machine that has it.
    """
    outputs = {"--report": report}
    if fallback is not None:
        overrides = [*overrides, _fallback_setting(fallback)]
    checks = compile_purpose(purpose)
    checked = [
        check(path, overrides, target, checks, outputs=outputs)
        if not search
        else _searched(path, overrides, target, cache, checks, outputs)
        for path in configs
    ]
    from graphtrain.api.programs import compile_report

    with progress() as observe:
        result = compile_report(
            checked,
            cache=cache,
            jobs=jobs,
            memory=memory,
            timeout=timeout,
            retries=retries,
            retry_failed=retry_failed,
            purpose=purpose,
            observe=observe,
            log=say,
        )
    print_problems(result)
    if as_json:
        click.echo(json.dumps(result.as_json()))
    else:
        print_report(result)
        for path, one in zip(configs, checked, strict=True):
            print_fallbacks(one, f"{path}: " if len(configs) > 1 else "")
        programs = {path: one.config.program for path, one in zip(configs, checked, strict=True)}
        for path, program in programs.items():
            _print_parameters(f"{path}: " if len(programs) > 1 else "", program, cache)
        if not result.count("failed"):
            for path, program in programs.items():
                run_command = command_line("run", path, target, overrides, cache)
                say_export_obstacle(program)
                _print_missing_runtime(program.target, run_command)
    if report is not None:
        write_report(report, result.as_json(), indent=2)
    if result.count("failed"):
        sys.exit(2)


def _searched(
    path: Path,
    overrides: Sequence[str],
    target: str | None,
    cache: Path,
    checks: "CompilationPurpose",
    outputs: Mapping[str, Path | None],
) -> "CheckedConfig":
    """Return the checked configuration with the strategy of its run or of its search."""
    from graphtrain.api.strategy import searched_config

    with progress() as observe:
        config = searched_config(
            path,
            compile=True,
            target=target,
            set=overrides,
            cache=cache,
            hint="",
            observe=observe,
            log=say,
        )
    found = check(config, (), None, checks, outputs=outputs)
    return replace(found, source=path)  # the name of its graphs in the report


def _fallback_setting(words: str) -> str:
    """Return run.fallback for --set."""
    counts = words.split(",")
    if not all(word.strip().isascii() and word.strip().isdigit() for word in counts):
        raise click.BadParameter(
            f"{words!r}: write numbers of hosts, as in 7,6", param_hint="--fallback"
        )
    return f"run.fallback=[{', '.join(str(int(word)) for word in counts)}]"


def print_fallbacks(checked: "CheckedConfig", label: str = "") -> None:
    """Print the mesh and the microbatches of a run on each of run.fallback, one line each."""
    if not checked.config.run.fallback:
        return
    from graphtrain.api.checks.fallback import fallbacks

    for one in fallbacks(checked.config):
        click.echo(f"{label}{one}")


def _print_parameters(label: str, program: "Program", cache: Path) -> None:
    """Print the number of parameters, if the training step of a program is in the cache."""
    from graphtrain.cache import Cache
    from graphtrain.compile.request_keys import request_keys
    from graphtrain.config.resolve import resolve
    from graphtrain.planning.parameters import count_compiled_parameters

    resolved = resolve(program)
    if train := Cache(cache).get_by_request(request_keys(resolved)["train"]):
        click.echo(f"{label}{count_compiled_parameters(resolved, train.record)}")


@contextmanager
def progress(*, is_main: bool = True) -> Iterator["Observer"]:
    """Show a live line for each graph on a terminal; elsewhere print a line for each change.

    Args:
        is_main: whether compiling is what the command is for. Otherwise cached graphs are not
            shown, one line says that a graph is compiled, and on a terminal no line remains.
    """
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield (
            lambda label, stage: (
                say(f"{label}: {stage}") if is_main or stage == "compiling" else None
            )
        )
        return
    columns = SpinnerColumn(), TextColumn("{task.fields[label]:<24}{task.description}")
    columns = (*columns, TimeElapsedColumn())
    with Progress(*columns, console=console, transient=not is_main) as display:
        rows = {}

        def observe(label: str, stage: str) -> None:
            if not is_main and stage == "cached":
                return
            if label not in rows:
                rows[label] = display.add_task(stage, total=1, label=label)
            ended = stage in ("cached", "compiled", "bundled", "failed", "searched")
            display.update(rows[label], description=stage, completed=int(ended))

        yield observe


def print_problems(report: "CompilationReport") -> None:
    """Print failures and warnings to standard error."""
    for outcome in report.outcomes:
        for warning in (outcome.preflight or {}).get("warnings", ()):
            say(f"{outcome.label}: warning: {warning}")
        if outcome.status == "failed":
            hint = "" if outcome.attempts else " (failed before; --retry-failed compiles it again)"
            say(f"{outcome.label} failed: {outcome.error}{hint}")
            if outcome.failure:
                say(f"  StableHLO and compiler log: {outcome.failure}")
    bundled = (outcome.error for outcome in report.outcomes if outcome.status == "bundled")
    for reason in dict.fromkeys(bundled):
        say(str(reason))


def print_report(report: "CompilationReport") -> None:
    """Print how many graphs were compiled, cached and failed, the time, and the peak memory."""
    from graphtrain.cache.sizes import format_size

    for outcome in report.outcomes:
        if outcome.preflight:
            click.echo(_instruction_estimate(outcome))
    click.echo(f"Total graphs:      {len(report.outcomes)}")
    click.echo(f"  compiled:        {report.count('compiled')}")
    if bundles := [outcome.bundle for outcome in report.outcomes if outcome.status == "bundled"]:
        click.echo(f"  bundled:         {len(bundles)}")
    click.echo(f"  failed:          {report.count('failed')}")
    click.echo(f"  already cached:  {report.count('cached')}")
    click.echo(f"Seconds:           {report.seconds:.1f}")
    peaks = [outcome.peak_bytes for outcome in report.outcomes if outcome.peak_bytes]
    if peaks:
        click.echo(f"Peak memory:       {format_size(max(peaks))} per compilation")
    if bundles:
        click.echo("Finish the bundles on a machine with neuronx-cc:")
        click.echo(f"  graphtrain neuron finish {' '.join(map(str, bundles))}")


def _print_missing_runtime(name: str, run: str) -> None:
    """Print what this machine lacks to run an Ascend target, which can be compiled anywhere."""
    if not name.startswith("ascend"):  # avoids the imports
        return
    from lowering.ascend.installation import missing_software
    from lowering.machine.target import Target

    target = Target.parse(name)
    if lacking := missing_software(target):
        click.echo(
            f"The graphs for {target} are compiled, but this machine cannot run them: it lacks "
            f"{lacking}.\nOn a machine that has it, with this cache, run:\n  {run}"
        )


def _instruction_estimate(outcome: "TaskOutcome") -> str:
    preflight = outcome.preflight or {}
    return (
        f"{outcome.label}: about {preflight['instructions']:,} instructions "
        f"({preflight['instructions_once']:,} with no loop unrolled), an estimate; "
        f"the limit is {preflight['instruction_limit']:,}"
    )
