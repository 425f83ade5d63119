"""graphtrain plan lock and check: write a plan as text, and compare it with the current plan."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from graphtrain.api.checks.purpose import PLAN
from graphtrain.cli.checked import check as check_config
from graphtrain.cli.options import (
    LocalPath,
    arguments,
    cache_option,
    check_output,
    config_argument,
    overrides_option,
    target_option,
    write_file,
)
from graphtrain.cli.plan_show import compile_or_estimate_option
from graphtrain.cli.terminal import say

if TYPE_CHECKING:
    from graphtrain.cost_model.assessment import Assessment

_DIFFERS = 5  # exit status


@click.command("lock")
@config_argument
@target_option
@overrides_option
@cache_option
@compile_or_estimate_option
@click.option(
    "--output",
    type=LocalPath(),
    metavar="FILE",
    help="File to write. [default: CONFIG with the suffix .plan]",
)
def lock(
    config: Path,
    target: str | None,
    overrides: Sequence[str],
    cache: Path,
    ask_compiler: bool,
    output: Path | None,
) -> None:
    """Write the plan of CONFIG (sharding, memory, communication) as text for version control."""
    from graphtrain.planning.lock import LOCK_MARK, lock_path, lock_text

    path = output or lock_path(config)
    check_output(path, LOCK_MARK)
    assessment = _assess(config, target, overrides, cache, ask_compiler)
    write_file(path, lock_text(assessment), LOCK_MARK)
    click.echo(f"wrote {path}")


@click.command("check")
@config_argument
@target_option
@overrides_option
@cache_option
@compile_or_estimate_option
@click.option(
    "--lock",
    "locked",
    type=LocalPath(),
    metavar="FILE",
    help="Lock to compare with. [default: CONFIG with the suffix .plan]",
)
def check(
    config: Path,
    target: str | None,
    overrides: Sequence[str],
    cache: Path,
    ask_compiler: bool,
    locked: Path | None,
) -> None:
    """Compare the plan of CONFIG with its lock.

    If they differ, prints the difference and exits with 5.
    """
    from graphtrain.planning.lock import lock_diff, lock_path, read_lock

    path = locked or lock_path(config)
    words = ["graphtrain", "plan", "lock", *arguments(config, target, overrides)]
    words += [] if ask_compiler else ["--no-compile"]
    words += ["--output", str(locked)] if locked else []
    rewrite = shlex.join(words)
    locked_text = read_lock(path, rewrite)
    assessment = _assess(config, target, overrides, cache, ask_compiler)
    diff_lines = lock_diff(locked_text, assessment, rewrite)
    if not diff_lines:
        click.echo(f"{path} is up to date")
        return
    click.echo("\n".join(diff_lines))
    say(f"{path} differs; if the change is intended, run: {rewrite}")
    sys.exit(_DIFFERS)


def _assess(
    config: Path, target: str | None, overrides: Sequence[str], cache: Path, ask_compiler: bool
) -> "Assessment":
    checked = check_config(config, overrides, target, PLAN)
    from graphtrain.cache import Cache
    from graphtrain.cli.compile import progress
    from graphtrain.config.resolve import resolve
    from graphtrain.planning.assess import assess

    program = resolve(checked.config.program)
    with progress() as observe:
        assessment = assess(program, Cache(cache), observe, compile=ask_compiler)
    if assessment.note:
        say(f"remark: {assessment.note}")
    return assessment
