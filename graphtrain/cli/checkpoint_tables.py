"""Tables and facts of checkpoints, as `graphtrain checkpoints` prints them."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from graphtrain.cache.sizes import format_size
from graphtrain.cli.terminal import printable

if TYPE_CHECKING:
    from graphtrain.checkpoints.listing import StoredCheckpoint

_HEADER = ("step", "age", "size", "loss", "validation", "status")
_UNITS = (("d", 86400), ("h", 3600), ("min", 60))


def print_checkpoints(found: Sequence[StoredCheckpoint], losses: Mapping[int, float]) -> None:
    """Print a row for each checkpoint.

    Args:
        found: The checkpoints.
        losses: Training losses by step.
    """
    rows = [_row(one, losses.get(one.step), time.time()) for one in found]
    if rows:
        _print_table([_HEADER, *rows])


def print_json(found: Sequence[StoredCheckpoint], losses: Mapping[int, float]) -> None:
    """Print the same as JSON."""
    click.echo(json.dumps([_facts(one, losses.get(one.step)) for one in found], indent=1))


def _facts(one: StoredCheckpoint, loss: float | None) -> dict[str, Any]:
    facts = asdict(one) | {"loss": loss}
    return {"bytes": facts.pop("nbytes"), **facts}


def _row(one: StoredCheckpoint, loss: float | None, now: float) -> tuple[str, ...]:
    status = one.status + (f": {one.reason}" if one.reason else "")
    age = _age(now - one.saved_at) if one.saved_at else ""
    return (
        str(one.step), age, format_size(one.nbytes), _number(loss), _number(one.validation_loss),
        status,
    )  # fmt: skip


def _age(seconds: float) -> str:
    for unit, size in _UNITS:
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False)]
        click.echo(printable("  ".join([*cells, row[-1]])))


def print_facts(facts: dict[str, Any]) -> None:
    """Print what a checkpoint is, as `describe_checkpoint` returns it."""
    saved = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(facts["saved_at"]))
    click.echo(f"step {facts['step']}, saved {saved}, {format_size(facts['bytes'])}")
    for name in ("validation_loss", "data_position", "changes"):
        if facts[name]:
            click.echo(printable(f"{name}: {json.dumps(facts[name])}"))
    for title in ("identity", "arrays", "files"):
        click.echo(f"\n{title}")
        for name, value in facts[title].items():
            text = "  ".join(map(_plain, value.values() if isinstance(value, dict) else [value]))
            click.echo(printable(f"  {name}  {text}"))


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
