"""graphtrain plan search: rank the strategies for a model, a batch and a machine."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from graphtrain.cli.options import (
    cache_option,
    config_argument,
    json_option,
    overrides_option,
    target_option,
)
from graphtrain.cli.plan_show import DOES_NOT_FIT, compile_option, console

if TYPE_CHECKING:
    from graphtrain.planning.search import Found
    from graphtrain.planning.verify import Verified


@click.command("search")
@config_argument
@target_option
@overrides_option
@cache_option
@compile_option
@click.option(
    "--best", type=click.IntRange(1), default=3, show_default=True, help="Strategies to compile."
)
@click.option(
    "--show", type=click.IntRange(1), default=10, show_default=True, help="Strategies to list."
)
@click.option("--jobs", type=click.IntRange(1), help="Compilers at once; the number of cores.")
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write CONFIG with the best strategy's settings.",
)
@json_option
def command(
    config: Path,
    target: str | None,
    overrides: Sequence[str],
    cache: Path,
    ask_compiler: bool,
    best: int,
    show: int,
    jobs: int | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Rank the strategies for CONFIG's model, batch and target.

    Every mesh whose sizes divide is estimated, with its microbatches, schedules, ZeRO and
    recomputation; CONFIG's own choice of these does not matter. The best are then compiled, into
    the cache and with no accelerator, and ranked by what the compiler made of them. Exits with 4 if
    no strategy fits.
    """
    from graphtrain.cache import Cache
    from graphtrain.cli.compile import progress
    from graphtrain.config import load_config, render
    from graphtrain.planning import ranking
    from graphtrain.planning.search import search
    from graphtrain.planning.verify import verify

    settings = load_config(config, overrides, target)
    found = search(settings.program, keep=max(show, 3 * best))
    verified: list[Verified] = []
    if ask_compiler:
        with progress() as observe:
            verified = verify(found, Cache(cache), best, jobs=jobs, observe=observe)
    if as_json:
        click.echo(json.dumps(ranking.as_json(found, verified, settings.program.target)))
    else:
        _print(found, verified, show)
    winner = verified[0].candidate if verified else next(iter(found.ranked), None)
    if winner is None or (verified and not verified[0].assessment.memory.fits):
        sys.exit(DOES_NOT_FIT)
    if output is not None:
        output.write_text(render(replace(settings, program=winner.program)), encoding="utf-8")
        click.echo(f"wrote {output}", err=True)


def _print(found: "Found", verified: "Sequence[Verified]", show: int) -> None:
    from graphtrain.planning import ranking

    out = console()
    out.print(f"{found.considered:,} strategies in {found.seconds:.1f} s\n")
    if found.ranked:
        out.print(ranking.table(ranking.rows(found, verified)[:show]))
    else:
        out.print("none fits")
    out.print("\nwhy the others lost")
    for family, reason in found.lost.items():
        out.print(f"  {family}: {reason}", soft_wrap=True)
