"""graphtrain plan diff: show the differences between the plans of two programs."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from graphtrain.api.checks.purpose import PLAN
from graphtrain.cli.checked import check
from graphtrain.cli.options import (
    ConfigPath,
    cache_option,
    json_option,
    overrides_option,
    target_option,
)
from graphtrain.cli.plan_show import compile_or_estimate_option, console
from graphtrain.cli.terminal import say


@click.command("diff")
@click.argument("before", type=ConfigPath())
@click.argument("after", type=ConfigPath(), required=False)
@target_option
@overrides_option
@click.option(
    "--with",
    "changes",
    metavar="SECTION.NAME=VALUE",
    multiple=True,
    help="Change a setting of AFTER only, for example --with program.mesh.tensor=2. May be "
    "repeated.",
)
@cache_option
@compile_or_estimate_option
@json_option
def diff(
    before: Path,
    after: Path | None,
    target: str | None,
    overrides: Sequence[str],
    changes: Sequence[str],
    cache: Path,
    ask_compiler: bool,
    as_json: bool,
) -> None:
    """Show how sharding, memory, communication and time differ between BEFORE and AFTER.

    If AFTER is left out, it is BEFORE with the changes of --with: this shows the effect of a
    setting.
    """
    if after is None and not changes:
        raise click.UsageError(
            "give a second configuration, or a setting to change: --with SECTION.NAME=VALUE"
        )
    from graphtrain.config.overrides import With

    checked = {
        "before": check(before, overrides, target, PLAN),
        "after": check(after or before, [*overrides, *map(With, changes)], target, PLAN),
    }
    from graphtrain.cache import Cache
    from graphtrain.cli.compile import progress
    from graphtrain.config.resolve import resolve
    from graphtrain.planning.assess import assess_all
    from graphtrain.planning.diff import differences
    from graphtrain.planning.text import changes_table

    programs = {name: resolve(one.config.program) for name, one in checked.items()}
    with progress() as observe:
        assessed = assess_all(programs, Cache(cache), observe, compile=ask_compiler)
    for name, assessment in assessed.items():
        if assessment.note:
            say(f"{name}: {assessment.note}")
    if any(one.phases for one in programs.values()):
        say("compared are the steps of the last phases; earlier [[program.phase]] are not")
    plan_changes = differences(assessed["before"], assessed["after"])
    if as_json:
        click.echo(json.dumps([asdict(change) for change in plan_changes]))
    elif plan_changes:
        console().print(changes_table(plan_changes))
    else:
        click.echo("no difference")
