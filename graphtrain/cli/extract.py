"""graphtrain extract: compile the graphs of a torch-xla script, without training."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from graphtrain.cli.compile import compile_limit_options, print_problems, print_report, progress
from graphtrain.cli.options import LocalPath, cache_option, json_option, write_report
from graphtrain.cli.terminal import say

if TYPE_CHECKING:
    from graphtrain.compile.tasks import CompilationReport
    from graphtrain.torch_xla.graphs import Extraction


@click.command("extract", context_settings={"allow_interspersed_args": False})
@click.argument("script", required=False, type=LocalPath())
@click.argument("arguments", nargs=-1, metavar="[ARGS]...")
@click.option(
    "--from",
    "source",
    type=LocalPath(file_okay=False),
    metavar="DIRECTORY",
    help="Compile the graphs in DIRECTORY, which were extracted before on this or another machine.",
)
@click.option(
    "--output",
    type=LocalPath(file_okay=False),
    metavar="DIRECTORY",
    default="extracted",
    show_default=True,
    help="Directory for the extracted graphs (HASH.hlo.pb) and graphs.json.",
)
@click.option(
    "--python",
    envvar="GRAPHTRAIN_TORCH_XLA_PYTHON",
    show_envvar=True,
    default=sys.executable,
    show_default="the one that runs graphtrain",
    metavar="FILE",
    help="Python interpreter in whose environment torch-xla is installed.",
)
@click.option(
    "--steps",
    type=click.IntRange(1),
    default=10,
    show_default=True,
    help="Number of training steps after which the script is ended.",
)
@click.option(
    "--reads",
    type=click.Choice(["refused", "zeros"]),
    default="refused",
    show_default=True,
    help="What happens if the script reads a value from the device, for example by loss.item(): "
    "refused is an error, zeros returns zeros.",
)
@click.option(
    "--target",
    metavar="NAME",
    help="Machine to compile for, for example h100:8. [default: a CPU with the script's number of "
    "devices]",
)
@click.option(
    "--no-compile", is_flag=True, help="Only extract the graphs; compile them later with --from."
)
@cache_option
@compile_limit_options
@json_option
def command(
    script: Path | None,
    arguments: Sequence[str],
    source: Path | None,
    output: Path,
    no_compile: bool,
    target: str | None,
    cache: Path,
    report: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Compile every graph of a torch-xla training SCRIPT into the cache, without training.

    The script runs unmodified with ARGS. Each graph that it would compile and run is stored under
    torch-xla's own hash instead. Options must precede SCRIPT. Exits with 2 if the script or a graph
    failed.
    """
    from graphtrain.torch_xla import graphs

    if (script is None) == (source is None):
        raise click.UsageError("give either a SCRIPT to extract graphs from, or --from DIRECTORY")
    if script is not None:
        extraction = _extract(script, arguments, output, options)
    else:
        assert source is not None
        extraction = graphs.read_extraction(source)
    if no_compile:
        _print_graphs(extraction, target, None, as_json, report)
        say(f"compile them with: graphtrain extract --from {source or output}")
        return
    result = _compile(extraction, target, cache, options)
    print_problems(result)
    _print_graphs(extraction, target, result, as_json, report)
    if result.count("failed"):
        sys.exit(2)


def _extract(
    script: Path, arguments: Sequence[str], output: Path, options: dict[str, Any]
) -> "Extraction":
    from graphtrain.torch_xla.extracting import extract

    return extract(
        script, arguments, output, options["python"], steps=options["steps"], reads=options["reads"]
    )


def _compile(
    extraction: "Extraction", target: str | None, cache: Path, options: dict[str, Any]
) -> "CompilationReport":
    from graphtrain.cache import Cache
    from graphtrain.compile import extracted_graphs
    from graphtrain.compile.driver import compile_tasks
    from graphtrain.compile.shared_cache import pull_requests
    from graphtrain.compile.tasks import Limits

    store = Cache(cache)
    tasks = extracted_graphs.compilation_tasks(
        extracted_graphs.extracted_graphs(extraction, target).values()
    )
    pull_requests(store, [task.request for task in tasks], say)
    limits = Limits(options["jobs"], options["memory"], options["timeout"], options["retries"])
    with progress() as observe:
        return compile_tasks(
            tasks, store, limits, retry_failed=options["retry_failed"], observe=observe
        )


def _print_graphs(
    extraction: "Extraction",
    target: str | None,
    result: "CompilationReport | None",
    as_json: bool,
    file: Path | None,
) -> None:
    """Print a row for each graph, with its result if it was compiled."""
    from graphtrain.cli.extract_report import as_dictionary, table

    contents = as_dictionary(extraction, target, result)
    if file is not None:
        write_report(file, contents, indent=2)
    if as_json:
        click.echo(json.dumps(contents))
        return
    for line in table(contents):
        click.echo(line)
    if result is not None:
        print_report(result)
