"""graphtrain plan: where every array lives and what each device holds."""

import json
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

import click

from graphtrain.cli.options import config_argument, json_option, overrides_option, target_option


@click.command("plan")
@config_argument
@target_option
@overrides_option
@click.option("--array", "pattern", default="*", metavar="PATTERN", help="Only these arrays.")
@json_option
def command(
    config: Path, target: str | None, overrides: Sequence[str], pattern: str, as_json: bool
) -> None:
    """Show how the training step of CONFIG is split over the target's devices."""
    from graphtrain.config import load_config
    from graphtrain.planning import plan_program
    from graphtrain.report import plan_as_json

    program = load_config(config, overrides, target).program
    plan = plan_program(program)
    arrays = [row for row in plan_as_json(plan) if fnmatch(row["path"], pattern)]
    if as_json:
        about = {
            "target": program.target,
            "devices": plan.mesh.devices,
            "mesh": dict(plan.mesh.axes),
        }
        click.echo(json.dumps(about | {"arrays": arrays}))
        return
    _print(program, plan, {row["path"] for row in arrays})


def _print(program, plan, shown: set[str]) -> None:
    from rich.console import Console

    from graphtrain.report import plan_table
    from lowering.target import Target
    from sharding_rules.plan import Plan

    console = Console()
    layouts = {path: layout for path, layout in plan.layouts.items() if path in shown}
    console.print(plan_table(Plan(plan.mesh, layouts), f"{program.target}: {plan.mesh}"))
    memory = Target.parse(program.target).memory_bytes
    held = {role: plan.bytes_per_device(role) for role in ("parameter", "optimizer")}
    console.print(
        f"\none device holds {_megabytes(held['parameter'])} of parameters and "
        f"{_megabytes(held['optimizer'])} of optimizer state, of {_megabytes(memory)}"
    )


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
