"""graphtrain dump: write named activations and gradients of training steps."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from graphtrain.api.checks.purpose import dump_purpose
from graphtrain.cli.checked import check
from graphtrain.cli.options import (
    LocalPath,
    cache_option,
    compile_hint,
    config_argument,
    json_option,
    overrides_option,
    process_options,
    step_option,
    target_option,
)
from graphtrain.cli.run import reported_compilation
from graphtrain.cli.terminal import say

if TYPE_CHECKING:
    from graphtrain.checkpoints.steps import StepName
    from graphtrain.run.dumps.files import StoredDump


@click.command("dump")
@config_argument
@click.argument("directory", required=False, type=LocalPath())
@click.option(
    "--steps", type=click.IntRange(1), default=1, show_default=True, help="Number of steps."
)
@click.option(
    "--arrays",
    multiple=True,
    metavar="PATTERN",
    help="Arrays to write, for example 'layers/*/attention*'. May be repeated. "
    "[default: program.dump.arrays]",
)
@click.option(
    "--summary/--whole",
    default=None,
    help="Write norm, largest value, mean, share of zeros and number of non-finite elements of "
    "each array, or whole arrays. [default: program.dump.summary]",
)
@click.option(
    "--torch",
    "eager",
    is_flag=True,
    help="Compute the step of an imported model in eager PyTorch, in float32, with the same "
    "weights and batch: outputs of modules and gradients, to compare with.",
)
@click.option("--list", "lists", is_flag=True, help="Print the names of the arrays, and stop.")
@step_option
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
@json_option
def command(
    config: Path,
    directory: Path | None,
    steps: int,
    arrays: Sequence[str],
    summary: bool | None,
    eager: bool,
    lists: bool,
    step: "StepName",
    target: str | None,
    overrides: Sequence[str],
    cache: Path,
    coordinator: str | None,
    count: int | None,
    rank: int | None,
    compile_missing: bool,
    as_json: bool,
) -> None:
    """Write activations and gradients of the next training steps of CONFIG into DIRECTORY.

    The steps start from the last checkpoint or, if there is none, from the initial state; the run
    is not changed. graphtrain compare finds the first difference between two dumps. With several
    processes, each runs the command, with one DIRECTORY that all see.
    """
    if directory is None and not lists:
        raise click.UsageError("name a DIRECTORY to write to, or use --list")
    from graphtrain.api.dumps import array_names, dump, with_arrays
    from graphtrain.run.processes import expected_rank, is_rank_zero

    purpose = dump_purpose(compiles=compile_missing, restores=step != 0)
    known = expected_rank(coordinator, count, rank)
    checked = check(config, overrides, target, purpose, rank=known)
    settings = with_arrays(checked.config, arrays, summary)
    if lists:
        _print_names(array_names(settings), as_json)
        return
    from graphtrain.cli.compile import progress

    assert directory is not None
    hint = _compile_hint(config, target, overrides, cache, arrays, summary)
    with reported_compilation(), progress(is_main=False) as observe:
        stored = dump(
            checked,
            directory,
            steps=steps,
            step=step,
            arrays=arrays,
            summary=summary,
            torch=eager,
            cache=cache,
            compile=compile_missing,
            coordinator=coordinator,
            processes=count,
            rank=rank,
            compile_hint=hint,
            observe=observe,
            log=say,
        )
    if is_rank_zero():
        _print_dump(stored, as_json)


def _compile_hint(
    config: Path,
    target: str | None,
    overrides: Sequence[str],
    cache: Path,
    arrays: Sequence[str],
    summary: bool | None,
) -> str:
    """Return the graphtrain compile command for a dump."""
    changes = []
    if arrays:
        changes.append(f"program.dump.arrays={json.dumps(list(arrays))}")
    if summary is not None:
        changes.append(f"program.dump.summary={json.dumps(summary)}")
    return f"{compile_hint(config, target, [*overrides, *changes], cache)} --for dump"


def _print_names(names: Sequence[tuple[str, list[int], list[str]]], as_json: bool) -> None:
    if as_json:
        keys = ("name", "shape", "lines")
        click.echo(json.dumps([dict(zip(keys, row, strict=True)) for row in names]))
        return
    width = max(len(name) for name, _, _ in names)
    for name, shape, lines in names:
        sizes = " x ".join(map(str, shape)) or "scalar"
        click.echo(f"{name:<{width}}  {sizes:<24}{lines[0] if lines else ''}".rstrip())


def _print_dump(stored: "StoredDump", as_json: bool) -> None:
    from graphtrain.files import counted

    index = stored.index
    steps = [entry["step"] for entry in index.steps]
    if as_json:
        about = ("step", "not_finite", "loss_scale", "skipped")
        facts = {
            "directory": str(stored.directory),
            "steps": steps,
            "not_finite": [
                {name: entry[name] for name in about}
                for entry in index.steps
                if entry["not_finite"]
            ],
        }
        click.echo(json.dumps(facts | {"arrays": [vars(one) for one in index.arrays]}))
        return
    arrays = counted(len(index.arrays), "summary" if index.summary else "array")
    arrays = arrays.replace("summarys", "summaries")
    numbers = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    click.echo(f"wrote {arrays} of {numbers} to {stored.directory}")
