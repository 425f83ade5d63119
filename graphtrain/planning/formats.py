"""Numbers as text; an unknown number is "unknown", never 0."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lowering.machine.target import Target

UNKNOWN = "unknown"


def machine_lines(target: Target) -> list[str]:
    """Return a line that says which numbers of a machine are of the user's file, if any are."""
    if not (numbers := target.specification.get("file_numbers")):
        return []
    return [f"{target.machine} as in {target.numbers_source}: {', '.join(numbers)}"]


def format_seconds(value: float | None) -> str:
    """Format a number of seconds with three significant digits, or "unknown"."""
    if value is None:
        return UNKNOWN
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def format_share(value: float | None) -> str:
    """Format a share in percent, or "unknown"."""
    return UNKNOWN if value is None else f"{value:.1%}"
