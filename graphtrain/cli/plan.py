"""graphtrain plan: where every array lives and what each device holds."""

import json
import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

import click

from graphtrain.cli.options import config_argument, json_option, overrides_option, target_option
from sharding_rules.errors import ShardingError

if TYPE_CHECKING:
    from graphtrain.config import Program
    from sharding_rules.plan import Plan


@click.command("plan")
@config_argument
@target_option
@overrides_option
@click.option("--array", "pattern", metavar="PATTERN", help="Only these arrays, as in '*mlp*'.")
@json_option
def command(
    config: Path, target: str | None, overrides: Sequence[str], pattern: str | None, as_json: bool
) -> None:
    """Show how the training step of CONFIG is split over the target's devices.

    Optimizer state rests where its parameters do, so it is listed only under --array and --json.
    """
    from graphtrain.config import load_config
    from graphtrain.planning.assess import plan_program
    from graphtrain.report import plan_as_json

    program = load_config(config, overrides, target).program
    plan = plan_program(program)
    if pattern is not None:
        shown = [path for path in plan.layouts if fnmatch(path, pattern)]
    elif as_json:
        shown = list(plan.layouts)
    else:
        shown = [p for p, layout in plan.layouts.items() if layout.spec.role != "optimizer"]
    if pattern is not None and not shown:
        raise ShardingError(f"no array matches {pattern!r}; an example: {next(iter(plan.layouts))}")
    if not as_json:
        _print(program, plan, shown)
        return
    about = {"target": program.target, "devices": plan.mesh.devices, "mesh": dict(plan.mesh.axes)}
    rows = [row for row in plan_as_json(plan) if row["path"] in shown]
    click.echo(json.dumps(about | {"arrays": rows}))


def _print(program: "Program", plan: "Plan", shown: Sequence[str]) -> None:
    from rich.console import Console

    from graphtrain.report import plan_table
    from lowering.target import Target

    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(f"{program.target}: mesh {plan.mesh}, rules {', '.join(program.rules)}\n")
    console.print(plan_table(plan, shown))
    memory = Target.parse(program.target).memory_bytes
    parameters, optimizer = map(plan.bytes_per_device, ("parameter", "optimizer"))
    console.print(
        f"\none device holds {_megabytes(parameters)} of parameters and {_megabytes(optimizer)} of "
        f"optimizer state, of {_megabytes(memory)}"
    )


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
