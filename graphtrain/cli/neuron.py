"""`graphtrain neuron`: the cache that AWS's Neuron tools share, and bundles for neuronx-cc."""

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from graphtrain.cli.options import (
    FiniteRange,
    LocalPath,
    cache_option,
    config_argument,
    json_option,
    overrides_option,
    target_option,
    write_report,
)
from graphtrain.cli.terminal import say
from graphtrain.cli.usage import Group

if TYPE_CHECKING:
    from lowering.neuron.persistent_cache.entries import NeuronCacheEntry
    from lowering.neuron.persistent_cache.finishing import FinishReport

_STALE_AFTER = 360.0  # minutes; the longest compilations known take a few hours

_root = click.argument("root", metavar="DIR", type=LocalPath())

_stale_after = click.option(
    "--stale-after",
    type=FiniteRange(min=0),
    default=_STALE_AFTER,
    show_default=True,
    metavar="MINUTES",
    help="Age in minutes from which a lock of another tool counts as stale, unless a neuronx-cc "
    "process on this machine is compiling its entry.",
)


def _compile_options(function: Callable) -> Callable:
    """Add the options that control how entries are compiled."""
    for option in (
        click.option(
            "--jobs",
            type=click.IntRange(1),
            help="Number of entries to compile in parallel. [default: one per 64 GiB of available "
            "memory, at most the number of cores]",
        ),
        click.option(
            "--retries",
            type=click.IntRange(0),
            default=1,
            show_default=True,
            envvar="NEURON_PARALLEL_COMPILE_MAX_RETRIES",
            show_envvar=True,
            help="Number of further attempts after a compiler is killed or crashes.",
        ),
        click.option(
            "--timeout",
            type=FiniteRange(min=0, min_open=True),
            help="Seconds after which a compilation is stopped. [default: no limit]",
        ),
        click.option(
            "--retry-failed",
            is_flag=True,
            help="Also compile entries that the compiler failed on before.",
        ),
        click.option(
            "--wait",
            is_flag=True,
            help="Wait for entries that other processes are compiling, instead of skipping them.",
        ),
        click.option(
            "--target",
            "target",
            metavar="NAME",
            help="Machine (neuronx-cc --target) of entries whose compiler flags name none.",
        ),
        click.option(
            "--report",
            type=LocalPath(),
            help="Write the results to this file, in the JSON of neuron_parallel_compile.",
        ),
        click.option(
            "--simulator",
            is_flag=True,
            help="Compile the entries in neuronxcc-0.0.0.0+simulator, which no device can run.",
        ),
        _stale_after,
    ):
        function = option(function)
    return function


@click.group("neuron", cls=Group)
def command() -> None:
    """Compile, inspect and clean the cache of AWS's Neuron tools; compile bundles.

    DIR is the value of NEURON_COMPILE_CACHE_URL; if unset, /var/tmp/neuron-compile-cache.
    """


@command.command("scan")
@_root
@_stale_after
@json_option
def scan(root: Path, stale_after: float, as_json: bool) -> None:
    """List the entries of DIR and their states."""
    entries = _entries(root, stale_after)
    if as_json:
        click.echo(json.dumps([_facts(entry) for entry in entries], indent=1))
        return
    for entry in entries:
        reason = f"  ({entry.reason})" if entry.reason else ""
        click.echo(f"{entry.state:<12}  {entry.compiler}/{entry.directory.name}{reason}")
    _print_status(entries)


@command.command("compile")
@_root
@_compile_options
def compile(root: Path, **options: Any) -> None:
    """Compile the unfinished entries of DIR in parallel, in place.

    Exits with 2 if an entry failed; the other entries are completed all the same.
    """
    _compile(root, **options)


@command.command("clean-locks")
@_root
@_stale_after
@click.option(
    "--force", is_flag=True, help="Also remove the locks of processes that are still compiling."
)
def clean_locks(root: Path, stale_after: float, force: bool) -> None:
    """Remove the stale locks of ended processes from DIR."""
    from lowering.neuron.persistent_cache import locks

    all_locks = [lock for entry in _entries(root, stale_after) for lock in entry.locks]
    judge = locks.LockChecker(stale_after * 60)
    removed = locks.remove_stale(all_locks, root, judge, force=force) if all_locks else []
    removed_paths = {lock.path for lock in removed}
    for lock in all_locks:
        action = "removed" if lock.path in removed_paths else "kept"
        click.echo(f"{action} {lock.path} ({lock.owner})")
    say(f"removed {len(removed_paths)} locks; {len(all_locks) - len(removed_paths)} remain")


@command.command("analyze")
@_root
@_stale_after
@json_option
def analyze(root: Path, stale_after: float, as_json: bool) -> None:
    """Summarize the entries of DIR, and the problems that unfinished entries would meet."""
    from lowering.neuron.persistent_cache.analysis import summarise

    entries = _entries(root, stale_after)
    summary = summarise(entries)
    if as_json:
        click.echo(json.dumps(summary, indent=1))
        return
    _print_analysis(summary)
    _print_status(entries)


@command.command("collect")
@_root
@click.argument("words", metavar="COMMAND...", nargs=-1, required=True)
@click.option(
    "--no-compile",
    is_flag=True,
    help="Only extract the programs; compile them later, on any machine.",
)
@click.option(
    "--ignore-failure",
    is_flag=True,
    envvar="NEURON_IGNORE_TRAINING_SCRIPT_ERROR_AND_COMPILE",
    show_envvar=True,
    help="If COMMAND fails, compile the programs that it extracted before.",
)
@_compile_options
def collect(
    root: Path, words: Sequence[str], no_compile: bool, ignore_failure: bool, **options: Any
) -> None:
    """Run COMMAND to extract its programs with the Neuron plugin, then compile them in DIR.

    COMMAND trains for a few steps with the Neuron plugin of JAX or PyTorch, for example graphtrain
    graphtrain neuron collect DIR -- python train.py --steps 3. The plugin extracts programs without
    executing them. graphtrain neuron extract CONFIG is such a command.
    """
    from lowering.errors import LoweringError
    from lowering.neuron.plugin import extract

    stale_after = options["stale_after"]
    known_directories = (
        {entry.directory for entry in _entries(root, stale_after)} if root.exists() else set()
    )
    extract(words, root, ignore_failure=ignore_failure)
    entries = _entries(root, stale_after)
    new_entries = [entry for entry in entries if entry.directory not in known_directories]
    say(f"extracted {len(new_entries)} new programs into {root}")
    if not entries:
        raise LoweringError(
            f"{words[0]} succeeded but extracted no program into {root}: it did not use the Neuron "
            "plugin; install libneuronxla in its environment, from AWS's package index"
        )
    if not no_compile:
        _compile(root, **options)


@command.command("extract")
@config_argument
@target_option
@overrides_option
def extract(config: Path, target: str | None, overrides: Sequence[str]) -> None:
    """Pass every graph of CONFIG to the Neuron plugin of JAX, as a COMMAND for collect."""
    from graphtrain.config import load_config
    from graphtrain.config.resolve import resolve
    from lowering.errors import LoweringError
    from lowering.neuron import plugin

    program = resolve(load_config(config, overrides, target).program)
    machine = program.target
    if machine.platform != "neuron" or machine.runs_on_cpu:
        raise LoweringError(f"{machine} has no Neuron plugin; name a target such as trn1:32")
    plugin.check_installed(machine)
    from graphtrain.compile.neuron_plugin import extract_graphs

    extract_graphs(program, lambda graph, stage: say(f"{graph}: {stage}"))


@command.command("finish")
@click.argument("bundles", nargs=-1, required=True, type=LocalPath(file_okay=False))
@cache_option
def finish(bundles: Sequence[Path], cache: Path) -> None:
    """Compile BUNDLES into the cache.

    `graphtrain compile` writes a bundle for each graph whose compiler is not installed. A bundle
    whose compile.sh was run already is not compiled again. Exits with 2 if a bundle failed; the
    others are stored all the same.
    """
    from graphtrain.cache import Cache
    from graphtrain.compile.neuron_bundles import compile_bundle
    from graphtrain.errors import GraphtrainError
    from lowering.errors import LoweringError

    failed = False
    for directory in bundles:
        try:
            click.echo(f"{directory}: {compile_bundle(directory, Cache(cache))}")
        except (GraphtrainError, LoweringError) as error:
            say(f"error: {directory}: {error}")
            failed = True
    if failed:
        sys.exit(2)


def _entries(root: Path, stale_after: float) -> "list[NeuronCacheEntry]":
    from lowering.neuron.persistent_cache import entries, locks

    return entries.scan(root, locks.LockChecker(stale_after * 60))


def _compile(
    root: Path, *, stale_after: float, report: Path | None, simulator: bool, **settings: Any
) -> None:
    """Compile the unfinished entries and print the results; exit with 2 if an entry failed."""
    from lowering.neuron.persistent_cache.compilation import CompileOptions
    from lowering.neuron.persistent_cache.finishing import finish

    # On SIGTERM, stop the compilers and release the locks, as on Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    chosen = CompileOptions(**settings, stale_after=stale_after * 60)
    finished = finish(
        root,
        chosen,
        lambda name, stage: say(f"{name}: {stage}"),
        simulator=simulator,
    )
    _print_status(_entries(root, stale_after))
    _print_finished(finished, report)
    if any(outcome.status == "failed" for outcome in finished.outcomes):
        sys.exit(2)


def _print_finished(finished: "FinishReport", file: Path | None) -> None:
    from lowering.neuron.persistent_cache import report

    for outcome in finished.outcomes:
        if outcome.failure is not None:
            hint = "" if outcome.attempts else " (failed before; --retry-failed compiles it again)"
            failure = outcome.failure
            say(f"{outcome.program}: {failure.kind}: {failure.message}{hint}")
    written = report.as_json(finished)
    if file is not None:
        write_report(file, written, indent=4)
    if os.environ.get(report.DUMP_VARIABLE):
        report.dump(written, Path.cwd())
    for line in report.summary_lines(finished.outcomes):
        click.echo(line)


def _print_status(entries: "Sequence[NeuronCacheEntry]") -> None:
    from lowering.neuron.persistent_cache.report import status_line

    click.echo(status_line(entries))


def _print_analysis(summary: dict[str, Any]) -> None:
    from graphtrain.cache.sizes import format_size

    for name, facts in summary["compilers"].items():
        states = ", ".join(f"{count} {state}" for state, count in facts["states"].items())
        click.echo(f"{name}: {states}; {format_size(facts['bytes'])}")
    for key, facts in summary["flags"].items():
        written = "unknown" if facts["flags"] is None else json.dumps(facts["flags"])
        click.echo(f"flags {key}: {facts['entries']} entries, {written}")
    for title in ("failures", "codes"):
        for name, count in summary[title].items():
            click.echo(f"{title} {name}: {count}")
    for problem in summary["problems"]:
        click.echo(f"{problem['entry']}: {problem['problem']}")


def _facts(entry: "NeuronCacheEntry") -> dict[str, Any]:
    return {
        "entry": f"{entry.compiler}/{entry.directory.name}",
        "state": entry.state,
        "reason": entry.reason,
        "bytes": entry.nbytes,
        "program": str(entry.program) if entry.program else None,
        "locks": [str(lock.path) for lock in entry.locks],
    }
