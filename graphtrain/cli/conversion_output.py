"""Output of the commands of `graphtrain convert`, and an option of several."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from graphtrain.weights.conversion import ConversionSummary, Progress

averaged_option = click.option(
    "--averaged",
    is_flag=True,
    help="Write the moving average of the weights (program.optimizer.ema_decay).",
)


@contextmanager
def conversion_progress() -> Iterator[Progress]:
    """Show a progress bar on a terminal; elsewhere nothing."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as display:
        row = display.add_task("arrays", total=None)
        yield lambda completed, count: display.update(row, completed=completed, total=count)


def print_usage_hint(destination: Path, as_json: bool) -> None:
    """Print how a configuration uses a converted folder; with --json nothing."""
    if not as_json:
        click.echo(
            f"to use it, set in a configuration: [program.model] preset = "
            f'"{destination}/model.toml" and [run] init_from = "{destination}"'
        )


def print_summary(summary: ConversionSummary, destination: Path, as_json: bool) -> None:
    """Print what a conversion of weights wrote."""
    if as_json:
        print_summary_json(summary, destination)
        return
    click.echo(
        f"{destination}: {summary.family}, {summary.parameters:,} parameters in {summary.arrays} "
        f"arrays, {summary.dtype}"
    )


def print_summary_json(summary: Any, destination: Path) -> None:
    """Print a dataclass of what was written as JSON, with the folder."""
    from dataclasses import asdict

    click.echo(json.dumps(asdict(summary) | {"folder": str(destination)}))
