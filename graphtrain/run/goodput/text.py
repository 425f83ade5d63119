"""Goodput of a run as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from graphtrain.files import counted
from graphtrain.run.goodput.activities import BUCKETS

if TYPE_CHECKING:
    from graphtrain.run.goodput.account import Goodput, ProcessSummary


def goodput_text(goodput: Goodput) -> str:
    """Return the tables of buckets and of starts, with a sentence about compilation."""
    lines = [
        f"{goodput.directory}: goodput {goodput.goodput:.1%} of {_time(goodput.wall_seconds)}; "
        f"{goodput.steps:,} steps in {counted(len(goodput.processes), 'start')}",
        "",
    ]
    for name, seconds in goodput.seconds.items():
        if seconds:
            share = seconds / goodput.wall_seconds
            lines.append(f"{name:<24} {seconds:>12,.1f} s {share:>7.1%}  {BUCKETS[name]}")
    lines.append(f"{'wall time':<24} {goodput.wall_seconds:>12,.1f} s {1:>7.1%}")
    lines += ["", "start                  host             seconds    steps        wasted  end"]
    lines += [_start(one) for one in goodput.processes]
    lines += ["", *_remarks(goodput)]
    return "\n".join(lines)


def _start(process: ProcessSummary) -> str:
    when = datetime.fromtimestamp(process.started_at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    steps = "none"
    if process.last_step is not None:
        steps = f"{(process.first_step or 0) + 1}-{process.last_step}"
    return (
        f"{when[:19]:<22} {process.host[:15]:<15} {process.seconds:>8,.1f}    {steps:<12} "
        f"{process.wasted_steps:>6}  {process.outcome}"
    )


def _remarks(goodput: Goodput) -> list[str]:
    remarks = []
    if goodput.compile_seconds is not None:
        remarks.append(
            f"Compilation: {goodput.preparing_seconds:,.1f} s, with programs that were fetched. To "
            f"compile in each start would have taken {goodput.compile_seconds:,.1f} s each time, "
            f"{goodput.compile_seconds * len(goodput.processes):,.1f} s in all, without tracing."
        )
    if goodput.pause_seconds:
        remarks.append(
            f"Not counted: {_time(goodput.pause_seconds)} between the completion of the run and "
            "its continuation."
        )
    if goodput.damaged_lines:
        remarks.append(f"{goodput.damaged_lines} damaged lines of goodput.jsonl are left out.")
    return remarks


def goodput_json(goodput: Goodput) -> dict[str, Any]:
    """Return the account as JSON: times in seconds, moments as Unix time."""
    fields = asdict(goodput)
    del fields["pieces"]
    seconds = {name: round(seconds, 4) for name, seconds in goodput.seconds.items()}
    share = round(goodput.goodput, 6)
    return fields | {"directory": str(goodput.directory), "goodput": share, "seconds": seconds}


def _time(seconds: float) -> str:
    """Format a duration as its two largest units."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
