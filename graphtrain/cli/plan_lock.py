"""graphtrain plan lock and check: a plan as text in git, and whether it still holds."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from graphtrain.cli.options import (
    cache_option,
    config_argument,
    overrides_option,
    target_option,
    write_file,
)
from graphtrain.cli.plan_show import compile_option

if TYPE_CHECKING:
    from graphtrain.cost_model.assessment import Assessment

_DIFFERS = 5  # exit status


@click.command("lock")
@config_argument
@target_option
@overrides_option
@cache_option
@compile_option
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Where to write; CONFIG with the suffix .plan if left out.",
)
def lock(
    config: Path,
    target: str | None,
    overrides: Sequence[str],
    cache: Path,
    ask_compiler: bool,
    output: Path | None,
) -> None:
    """Write the plan of CONFIG as text to keep in git: placement, memory, communication."""
    from graphtrain.planning.lock import lock_path, lock_text

    assessment = _assess(config, target, overrides, cache, ask_compiler)
    path = output or lock_path(config)
    write_file(path, lock_text(assessment))
    click.echo(f"wrote {path}")


@click.command("check")
@config_argument
@target_option
@overrides_option
@cache_option
@compile_option
@click.option(
    "--lock",
    "locked",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The lock to compare with; CONFIG with the suffix .plan if left out.",
)
def check(
    config: Path,
    target: str | None,
    overrides: Sequence[str],
    cache: Path,
    ask_compiler: bool,
    locked: Path | None,
) -> None:
    """Compare the plan of CONFIG with its lock; exit with 5 and the difference if they differ."""
    from graphtrain.errors import PlanError
    from graphtrain.planning.lock import changes, lock_path

    path = locked or lock_path(config)
    if not path.exists():
        raise PlanError(f"{path}: no such file; write it: graphtrain plan lock {config}")
    found = changes(path.read_text(), _assess(config, target, overrides, cache, ask_compiler))
    if not found:
        click.echo(f"{path} holds")
        return
    click.echo("\n".join(found))
    click.echo(f"{path} does not hold; if the change is meant: graphtrain plan lock", err=True)
    sys.exit(_DIFFERS)


def _assess(
    config: Path, target: str | None, overrides: Sequence[str], cache: Path, ask_compiler: bool
) -> "Assessment":
    from graphtrain.cache import Cache
    from graphtrain.cli.compile import progress
    from graphtrain.config import load_config
    from graphtrain.planning.assess import assess

    program = load_config(config, overrides, target).program
    with progress() as observe:
        assessment = assess(program, Cache(cache), observe, compile=ask_compiler)
    if assessment.remark:
        click.echo(f"remark: {assessment.remark}", err=True)
    return assessment
