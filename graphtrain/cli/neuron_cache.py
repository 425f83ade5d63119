"""graphtrain neuron-cache: the cache that AWS's tools share; listed, finished, cleaned."""

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from graphtrain.cli.options import json_option, overrides_option, target_option, write_file

if TYPE_CHECKING:
    from lowering.neuron.persistent_cache.entries import Entry
    from lowering.neuron.persistent_cache.finishing import Finished

_STALE_AFTER = 360.0  # minutes; the longest compilations known take a few hours

_root = click.argument("root", metavar="DIR", type=click.Path(path_type=Path))

_stale_after = click.option(
    "--stale-after",
    type=click.FloatRange(min=0),
    default=_STALE_AFTER,
    show_default=True,
    metavar="MINUTES",
    help="Age from which a lock of another tool counts as left behind, if no neuronx-cc on this "
    "machine has its entry.",
)


def _compile_options(function: Callable) -> Callable:
    """How entries are compiled."""
    for option in (
        click.option("--jobs", type=click.IntRange(1), help="Compilers at once; one for 64 GiB."),
        click.option(
            "--retries",
            type=click.IntRange(0),
            default=1,
            show_default=True,
            envvar="NEURON_PARALLEL_COMPILE_MAX_RETRIES",
            show_envvar=True,
            help="Further attempts for a compiler that was killed or crashed.",
        ),
        click.option("--timeout", type=click.FloatRange(min=0, min_open=True), help="Seconds."),
        click.option("--retry-failed", is_flag=True, help="Also what the compiler has refused."),
        click.option("--wait", is_flag=True, help="For entries that others compile, to the end."),
        click.option(
            "--target", "machine", metavar="NAME", help="For entries whose flags name no machine."
        ),
        click.option("--report", type=click.Path(path_type=Path), help="Write AWS's JSON here."),
        click.option(
            "--simulator",
            is_flag=True,
            help="Compile what stands in neuronxcc-0.0.0.0+simulator, for no Neuron device.",
        ),
        _stale_after,
    ):
        function = option(function)
    return function


@click.group("neuron-cache")
def command() -> None:
    """Look into, finish and clean a cache that AWS's Neuron tools have made.

    DIR is what NEURON_COMPILE_CACHE_URL names: /var/tmp/neuron-compile-cache unless it was set.
    """


@command.command("scan")
@_root
@_stale_after
@json_option
def scan(root: Path, stale_after: float, as_json: bool) -> None:
    """List the entries of DIR with the state of each."""
    entries = _entries(root, stale_after)
    if as_json:
        click.echo(json.dumps([_facts(entry) for entry in entries], indent=1))
        return
    for entry in entries:
        said = f"  ({entry.reason})" if entry.reason else ""
        click.echo(f"{entry.state:<12}  {entry.compiler}/{entry.directory.name}{said}")
    _print_status(entries)


@command.command("compile")
@_root
@_compile_options
def compile(root: Path, **about: Any) -> None:
    """Compile the unfinished entries of DIR in parallel, each in its place.

    Exits with 2 if one failed; the others are complete all the same.
    """
    _compile(root, **about)


@command.command("clean-locks")
@_root
@_stale_after
@click.option("--force", is_flag=True, help="Also locks of those who live, and still compile.")
def clean_locks(root: Path, stale_after: float, force: bool) -> None:
    """Remove the locks that dead processes left in DIR."""
    from lowering.neuron.persistent_cache import locks

    found = [lock for entry in _entries(root, stale_after) for lock in entry.locks]
    judge = locks.Judge(stale_after * 60)
    removed = locks.clear(found, root, judge, force=force) if found else []
    gone = {lock.path for lock in removed}
    for lock in found:
        done = "removed" if lock.path in gone else "kept"
        click.echo(f"{done} {lock.path} ({lock.owner})")
    click.echo(f"removed {len(gone)} locks; {len(found) - len(gone)} remain", err=True)


@command.command("analyze")
@_root
@_stale_after
@json_option
def analyze(root: Path, stale_after: float, as_json: bool) -> None:
    """Say in numbers what DIR holds, and what the compiler would refuse of what is unfinished."""
    from lowering.neuron.persistent_cache.analysis import summarise

    entries = _entries(root, stale_after)
    found = summarise(entries)
    if as_json:
        click.echo(json.dumps(found, indent=1))
        return
    _print_analysis(found)
    _print_status(entries)


@command.command("collect")
@_root
@click.argument("words", metavar="COMMAND...", nargs=-1, required=True)
@click.option("--no-compile", is_flag=True, help="Only extract; compile later, anywhere.")
@click.option(
    "--ignore-failure",
    is_flag=True,
    envvar="NEURON_IGNORE_TRAINING_SCRIPT_ERROR_AND_COMPILE",
    show_envvar=True,
    help="Compile also what a COMMAND that fails had left.",
)
@_compile_options
def collect(
    root: Path, words: Sequence[str], no_compile: bool, ignore_failure: bool, **about: Any
) -> None:
    """Run COMMAND for the programs it gives to Neuron's plugin, then compile those in DIR.

    COMMAND trains for a few steps with the plugin of JAX or PyTorch, as in
    graphtrain neuron-cache collect DIR -- python train.py --steps 3. The plugin executes nothing
    meanwhile. graphtrain neuron-cache extract CONFIG is such a command.
    """
    from lowering.errors import LoweringError
    from lowering.neuron.plugin import extract

    stale_after = about["stale_after"]
    before = {entry.directory for entry in _entries(root, stale_after)} if root.exists() else set()
    extract(words, root, ignore_failure=ignore_failure)
    entries = _entries(root, stale_after)
    appeared = [entry for entry in entries if entry.directory not in before]
    click.echo(f"extracted {len(appeared)} new programs into {root}", err=True)
    if not entries:
        raise LoweringError(
            f"{words[0]} ended well and left no program in {root}: it has not used the Neuron "
            "plugin; install libneuronxla with it, from AWS's index"
        )
    if not no_compile:
        _compile(root, **about)


@command.command("extract")
@click.argument("config", type=click.Path(path_type=Path))
@target_option
@overrides_option
def extract(config: Path, target: str | None, overrides: Sequence[str]) -> None:
    """Give every graph of CONFIG to JAX's plugin for Neuron; for neuron-cache collect."""
    from graphtrain.config import load_config
    from lowering.errors import LoweringError
    from lowering.machine.target import Target
    from lowering.neuron import plugin

    program = load_config(config, overrides, target).program
    machine = Target.parse(program.target)
    if machine.platform != "neuron" or machine.on_host:
        raise LoweringError(f"{machine} has no Neuron plugin; name a target such as trn1:32")
    plugin.check(machine)
    from graphtrain.compile.neuron_plugin import extract

    extract(program, lambda graph, stage: click.echo(f"{graph}: {stage}", err=True))


def _entries(root: Path, stale_after: float) -> "list[Entry]":
    from lowering.neuron.persistent_cache import entries, locks

    return entries.scan(root, locks.Judge(stale_after * 60))


def _compile(
    root: Path, *, stale_after: float, report: Path | None, simulator: bool, **settings: Any
) -> None:
    """Compile what is unfinished, print what became of it, and exit with 2 if something failed."""
    from lowering.neuron.persistent_cache.compilation import Settings
    from lowering.neuron.persistent_cache.finishing import finish

    # A job that is cancelled stops its compilers and gives its locks back, as on Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    chosen = Settings(**settings, stale_after=stale_after * 60)
    finished = finish(
        root,
        chosen,
        lambda name, stage: click.echo(f"{name}: {stage}", err=True),
        simulator=simulator,
    )
    _print_status(_entries(root, stale_after))
    _print_finished(finished, report)
    if any(outcome.status == "failed" for outcome in finished.outcomes):
        sys.exit(2)


def _print_finished(finished: "Finished", file: Path | None) -> None:
    from lowering.neuron.persistent_cache import report

    for outcome in finished.outcomes:
        if outcome.failure is not None:
            known = "" if outcome.attempts else " (as before; --retry-failed compiles it again)"
            failure = outcome.failure
            click.echo(f"{outcome.program}: {failure.kind}: {failure.said}{known}", err=True)
    written = report.as_json(finished)
    if file is not None:
        write_file(file, json.dumps(written, indent=4) + "\n")
    if os.environ.get(report.DUMP_VARIABLE):
        report.dump(written, Path.cwd())
    for line in report.summary_lines(finished.outcomes):
        click.echo(line)


def _print_status(entries: "Sequence[Entry]") -> None:
    from lowering.neuron.persistent_cache.report import status_line

    click.echo(status_line(entries))


def _print_analysis(found: dict[str, Any]) -> None:
    from graphtrain.cache.sizes import readable

    for name, about in found["compilers"].items():
        states = ", ".join(f"{count} {state}" for state, count in about["states"].items())
        click.echo(f"{name}: {states}; {readable(about['bytes'])}")
    for key, about in found["flags"].items():
        written = "unknown" if about["flags"] is None else json.dumps(about["flags"])
        click.echo(f"flags {key}: {about['entries']} entries, {written}")
    for title in ("failures", "codes"):
        for name, count in found[title].items():
            click.echo(f"{title} {name}: {count}")
    for each in found["problems"]:
        click.echo(f"{each['entry']}: {each['problem']}")


def _facts(entry: "Entry") -> dict[str, Any]:
    return {
        "entry": f"{entry.compiler}/{entry.directory.name}",
        "state": entry.state,
        "reason": entry.reason,
        "bytes": entry.nbytes,
        "program": str(entry.program) if entry.program else None,
        "locks": [str(lock.path) for lock in entry.locks],
    }
