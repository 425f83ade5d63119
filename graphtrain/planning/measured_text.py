"""Table of a step's time by the profile of a machine: by the clock, and of the processor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphtrain.planning.formats import format_seconds
from graphtrain.planning.tables import empty_table

if TYPE_CHECKING:
    from rich.table import Table

    from graphtrain.cost_model.measured_time import MeasuredTime, PartSeconds


def measured_table(time: MeasuredTime) -> Table:
    """Return the table of a step's time, whose operations are those of the compiled program."""
    table = empty_table("step time", ">seconds", ">processor", "source")
    sent = {f"communication over {axes}": part for axes, part in time.communication.items()}
    parts: dict[str, PartSeconds] = {
        "products": time.products,
        "loops between products": time.loops,
        **sent,
        "starting operations": time.overheads,
    }
    for name, part in parts.items():
        table.add_row(name, *_seconds(part), "profile, operations: compiler")
    table.add_row("step", *_seconds(time.total), time.source)
    return table


def _seconds(part: PartSeconds) -> tuple[str, str]:
    return format_seconds(part.clock), format_seconds(part.processor)
