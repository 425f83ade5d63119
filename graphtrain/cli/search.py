"""graphtrain plan search: rank the parallelism strategies for a model, a batch and a machine."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from graphtrain.api.checks.purpose import SEARCH
from graphtrain.cli.checked import check
from graphtrain.cli.cost_options import cost_options, workload
from graphtrain.cli.options import (
    LocalPath,
    cache_option,
    check_output,
    config_argument,
    json_option,
    overrides_option,
    target_option,
    write_file,
)
from graphtrain.cli.plan_show import DOES_NOT_FIT, console
from graphtrain.cli.terminal import say

if TYPE_CHECKING:
    from graphtrain.config import Config, Program
    from graphtrain.planning.candidates import Candidate
    from graphtrain.planning.costs import Workload
    from graphtrain.planning.search import SearchResult


@click.command("search")
@config_argument
@target_option
@overrides_option
@cache_option
@click.option(
    "--verify",
    type=click.IntRange(0),
    default=3,
    show_default=True,
    help="Number of the best fitting strategies to compile, and to rank again by their compiled "
    "memory and communication.",
)
@click.option(
    "--top",
    type=click.IntRange(1),
    default=10,
    show_default=True,
    help="Number of strategies to show.",
)
@click.option(
    "--jobs",
    type=click.IntRange(1),
    help="Number of strategies to compile in parallel. [default: number of cores]",
)
@click.option(
    "--output",
    type=LocalPath(dir_okay=False),
    metavar="FILE",
    help="Write CONFIG with the settings of the best strategy to FILE.",
)
@cost_options
@json_option
def command(
    config: Path,
    target: str | None,
    overrides: Sequence[str],
    cache: Path,
    verify: int,
    top: int,
    jobs: int | None,
    output: Path | None,
    as_json: bool,
    tokens: int | None,
    prices: Path | None,
) -> None:
    """Rank the parallelism strategies for the model, batch and target of CONFIG.

    Estimates every valid mesh with its microbatches, pipeline schedules, ZeRO and activation
    checkpointing; the values of these in CONFIG do not matter. The best are then compiled, into the
    cache and without an accelerator, and ranked again by their compiled memory and communication.
    Exits with 4 if no strategy fits.
    """
    loaded = check(config, overrides, target, SEARCH, outputs={"--output": output}).config
    from graphtrain.cache import Cache
    from graphtrain.cli.compile import progress
    from graphtrain.config import render
    from graphtrain.config.phase_settings import without_phases
    from graphtrain.planning.ranking import as_json as in_json
    from graphtrain.planning.search import search
    from graphtrain.planning.verify import COMPILATIONS_PER_STRATEGY, compile_best

    work = workload(loaded, tokens, prices)
    if output is not None:  # before the work; whether the content is the same is known only after
        check_output(output, render(loaded).partition("\n")[0])
    result = search(
        without_phases(loaded.program), keep=max(top, COMPILATIONS_PER_STRATEGY * verify)
    )
    with progress() as observe:
        compiled = compile_best(result.ranked, Cache(cache), verify, jobs=jobs, observe=observe)
    fitting = [candidate for candidate in compiled if candidate.memory.fits]
    ranked = [*fitting, *result.ranked[len(compiled) : top], *compiled[len(fitting) :]]
    if as_json:
        click.echo(json.dumps(in_json(result, ranked, work)))
    else:
        _print(loaded.program, result, ranked, work)
    if not ranked or not ranked[0].memory.fits:
        sys.exit(DOES_NOT_FIT)
    if output is not None:
        write_file(output, render(_with_strategy(loaded, ranked[0].program.settings)))
        say(f"wrote {output}")


def _with_strategy(config: "Config", best: "Program") -> "Config":
    """Return a configuration with the best strategy, and with its own phases."""
    from graphtrain.errors import PlanError

    try:
        return replace(config, program=replace(best, phase=config.program.phase))
    except ValueError as error:
        raise PlanError(
            f"the best strategy does not suit the phases of this configuration: {error}"
        ) from None


def _print(
    program: "Program", result: "SearchResult", ranked: "Sequence[Candidate]", work: "Workload"
) -> None:
    from graphtrain.planning.ranking import table

    out, batch = console(), program.batch
    out.print(
        f"{program.target}, {batch.global_batch_size} x {batch.seq_len} tokens per step: "
        f"{result.considered:,} strategies in {result.seconds:.1f} s\n"
    )
    out.print(table(ranked, work) if ranked else "no strategy fits")
    if note := work.note([candidate.cost(work) for candidate in ranked]):
        out.print(note)
    out.print("\nwhy other strategies rank lower")
    for family, reason in result.rejected.items():
        out.print(f"  {family}: {reason}", soft_wrap=True)
