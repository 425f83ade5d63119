"""graphtrain plan CONFIG --targets A,B: compare machines, one line each."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from graphtrain.cli.cost_options import workload
from graphtrain.cli.plan_show import DOES_NOT_FIT, console

if TYPE_CHECKING:
    from graphtrain.config.resolve import ResolvedProgram


def check_targets(names: Sequence[str]) -> None:
    """Refuse targets that do not exist, before any of them is assessed.

    Raises:
        PlanError: at least one does not exist, or is empty.
    """
    from graphtrain.errors import PlanError
    from lowering.errors import LoweringError
    from lowering.machine.target import Target

    if not all(names):
        raise PlanError(f"--targets {','.join(names)}: a name is missing beside a comma")
    problems = []
    for name in names:
        try:
            Target.parse(name)
        except LoweringError as error:
            problems.append(f"--targets {name}: {error}")
    if problems:
        raise PlanError("\n".join(problems))


def compare(
    targets: Sequence[str],
    config: Path,
    overrides: Sequence[str],
    cache: Path,
    ask_compiler: bool,
    jobs: int | None,
    as_json: bool,
    tokens: int | None,
    prices: Path | None,
) -> None:
    """Print one line for each target; exit with 2 if all are errors, with 4 if none fits."""
    from graphtrain.cache import Cache
    from graphtrain.cli.compile import progress
    from graphtrain.config import load_config
    from graphtrain.config.resolve import resolve
    from graphtrain.planning.formats import machine_lines
    from graphtrain.planning.json_output import target_rows
    from graphtrain.planning.targets import compare_targets
    from graphtrain.planning.targets_table import targets_table
    from lowering.machine.machine_tables import tables
    from lowering.machine.target import Target

    tables()  # a problem in targets.toml is an error, also for cpu:N
    work = workload(load_config(config, overrides), tokens, prices)
    for name in targets:
        work.check_prices(Target.parse(name))

    def vary(change: Sequence[str]) -> "ResolvedProgram":
        return resolve(load_config(config, [*overrides, *change]).program)

    with progress() as observe:
        rows = compare_targets(
            targets, vary, Cache(cache), work, compile=ask_compiler, jobs=jobs, observe=observe
        )
    if as_json:
        click.echo(json.dumps(target_rows(rows, work)))
    else:
        console().print(targets_table(rows, work))
        lines = (line for name in targets for line in machine_lines(Target.parse(name)))
        for line in dict.fromkeys(lines):
            click.echo(line)
        if note := work.note([row.cost for row in rows]):
            click.echo(note)
        for row in rows:
            if remark := row.error or (row.assessment.note if row.assessment else ""):
                click.echo(f"{row.target}: {remark}")
    if all(row.error for row in rows):
        sys.exit(2)
    if not any(row.fits for row in rows):
        sys.exit(DOES_NOT_FIT)
