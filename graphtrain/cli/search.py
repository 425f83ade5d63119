"""graphtrain plan search: the strategies for a model, a batch and a machine, best first."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from graphtrain.cli.options import (
    cache_option,
    config_argument,
    json_option,
    overrides_option,
    target_option,
)
from graphtrain.errors import PlanError

if TYPE_CHECKING:
    from graphtrain.config import Config
    from graphtrain.planning.search import Found
    from graphtrain.planning.verify import Verified


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
    help="Of the best, how many to compile; by their peak and traffic they are ranked again.",
)
@click.option("--top", type=click.IntRange(1), default=10, show_default=True, help="Rows to show.")
@click.option("--jobs", type=click.IntRange(1), help="Compilers at once; the number of cores.")
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write CONFIG with the winner's settings.",
)
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
) -> None:
    """Rank the strategies for the model, the batch and the target of CONFIG.

    The mesh, the rules, microbatches, recomputation and the pipeline of CONFIG are what is looked
    for; all else stays. Exits with 2 if nothing fits.
    """
    from graphtrain.cache import Cache
    from graphtrain.cli.compile import progress
    from graphtrain.config import load_config
    from graphtrain.planning.search import search
    from graphtrain.planning.verify import verified

    loaded = load_config(config, overrides, target)
    found = search(loaded.program, keep=max(top, verify))
    if not found.ranked:
        raise PlanError(_nothing_fits(loaded.program.target, found))
    with progress() as observe:
        rows = verified(found.ranked[:verify], Cache(cache), jobs, observe)
    rows = (*rows, *found.ranked[verify:top])
    if output is not None:
        _write(output, loaded, rows[0])
    if as_json:
        click.echo(json.dumps([_as_json(row) for row in rows]))
    else:
        _print(loaded, found, rows)


def _nothing_fits(target: str, found: "Found") -> str:
    reasons = "\n".join(f"  {family}: {reason}" for family, reason in found.lost.items())
    return (
        f"none of {found.considered} strategies fits {target}; ask for more devices, a smaller "
        f'batch, or model.remat = "full" with more microbatches\n{reasons}'
    )


def _write(path: Path, config: "Config", row: "Verified") -> None:
    from dataclasses import replace

    from graphtrain.config import render

    path.write_text(render(replace(config, program=row.program)), encoding="utf-8")
    click.echo(f"wrote {path}", err=True)


def _as_json(row: "Verified") -> dict[str, Any]:
    return {
        **row.settings,
        "step_seconds": row.time.total,
        "mfu": row.mfu,
        "peak_bytes": row.memory.peak,
        "source": row.memory.source,
        "fits": row.memory.fits,
    }


def _print(config: "Config", found: "Found", rows: Sequence["Verified"]) -> None:
    from rich.table import Table

    from graphtrain.cli.plan_show import console

    out, program = console(), config.program
    out.print(
        f"{program.target}, {program.batch.sequences} x {program.batch.length} tokens a step: "
        f"{found.considered:,} strategies in {found.seconds:.1f} s\n"
    )
    table = Table(box=None, pad_edge=False)
    for name in ("mesh", "rules", "micro", "remat", "pipeline", "seconds", "MFU", "GB", "says"):
        right = name in ("micro", "seconds", "MFU", "GB")
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    for row in rows:
        table.add_row(*_cells(row))
    out.print(table)
    out.print("\nwhy the others lost")
    for family, reason in found.lost.items():
        out.print(f"  {family}: {reason}")


def _cells(row: "Verified") -> tuple[str, ...]:
    pipeline = row.settings.get("pipeline")
    schedule = f"{pipeline['schedule']} x {pipeline['rounds']}" if pipeline else "-"
    return (
        str(row.mesh),
        row.choice("rules"),
        str(row.program.batch.microbatches),
        row.program.model.remat,
        schedule,
        f"{row.time.total:.3f}",
        f"{row.mfu:.1%}",
        f"{row.memory.peak / 1e9:.1f}",
        row.memory.source if row.memory.fits else f"{row.memory.source}: does not fit",
    )
