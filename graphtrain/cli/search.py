"""graphtrain plan search: rank the parallelism strategies for a model, a batch and a machine."""

import json
import sys
from collections.abc import Sequence
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
from graphtrain.errors import PlanError

if TYPE_CHECKING:
    from graphtrain.config import Config
    from graphtrain.planning.candidate import Candidate
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
    graphtrain run CONFIG --search trains with the best of these. [run.search] has limits: a largest
    global batch, and the memory of a device. Exits with 4 if no strategy fits.
    """
    loaded = check(config, overrides, target, SEARCH, outputs={"--output": output}).config
    from graphtrain.api.strategy import search_strategies
    from graphtrain.cache import Cache
    from graphtrain.cli.compile import progress
    from graphtrain.config import render
    from graphtrain.planning.chosen import searched_program, strategy_of, with_strategy
    from graphtrain.planning.ranking import as_json as in_json
    from lowering.machine.machine_tables import tables

    tables()  # a problem in targets.toml is an error, also for cpu:N
    work = workload(loaded, tokens, prices)
    if loaded.program.phases and work.tokens is not None:
        raise PlanError(
            "plan search ranks strategies of the last phase, and the tokens of earlier phases "
            "train at another speed; write the best strategy with --output, and give --tokens and "
            "--prices to graphtrain plan"
        )
    if output is not None:  # before the work; whether the content is the same is known only after
        check_output(output, render(loaded).partition("\n")[0])
    with progress() as observe:
        result, ranked = search_strategies(
            loaded, Cache(cache), verify=verify, keep=top, jobs=jobs, observe=observe
        )
    if as_json:
        about = {"target": loaded.program.target, "program": searched_program(loaded.program)}
        click.echo(json.dumps(about | in_json(result, ranked, work)))
    else:
        _print(loaded, result, ranked, work)
    if not ranked or not ranked[0].fits:
        sys.exit(DOES_NOT_FIT)
    if output is not None:
        strategy = strategy_of(ranked[0].program.settings)
        write_file(output, render(with_strategy(loaded, strategy)))
        say(f"wrote {output}")


def _print(
    config: "Config", result: "SearchResult", ranked: "Sequence[Candidate]", work: "Workload"
) -> None:
    from graphtrain.planning import ranking

    out, program, batch = console(), config.program, config.program.batch
    out.print(
        f"{program.target}, {ranking.batch_range(result, batch)} tokens per step: "
        f"{result.considered:,} strategies in {result.seconds:.1f} s\n"
    )
    several = bool(result.batches)
    out.print(ranking.table(ranked, work, several=several) if ranked else "no strategy fits")
    if note := work.note([candidate.cost(work) for candidate in ranked]):
        out.print(note)
    if note := ranking.speeds_note(ranked):
        out.print(note, soft_wrap=True)
    for mesh, reason in {str(one.mesh): one.note for one in ranked if one.note}.items():
        out.print(f"{mesh}: {reason}", soft_wrap=True)
    if confirmed := ranking.confirmations(ranked, several=several):
        out.print("\nestimates and the compiler's numbers")
        out.print(confirmed)
    if result.batches:
        out.print("\nthe best estimate with each global batch")
        out.print(ranking.batch_table(result.batches))
    if ranked and (
        change := ranking.batch_change(batch, ranked[0].program.batch, config.run.steps)
    ):
        out.print(change, soft_wrap=True)
    out.print(f"\n{ranking.reasons_heading(result)}")
    for family, reason in result.rejected.items():
        out.print(f"  {family}: {reason}", soft_wrap=True)
