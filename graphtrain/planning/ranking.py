"""Output of a search: table for the terminal, and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from graphtrain.planning.candidates import Candidate
from graphtrain.planning.costs import Workload
from graphtrain.planning.search import SearchResult

if TYPE_CHECKING:
    from rich.table import Table

_TEXT_COLUMNS = "mesh", "zero", "sequence", "schedule", "micro", "remat"
_NUMBER_COLUMNS = "seconds", "MFU", "sent", "peak"


def as_json(
    search_result: SearchResult, ranked: Sequence[Candidate], workload: Workload
) -> dict[str, Any]:
    """Return the result of a search as JSON; the names contain the units."""
    return {
        "considered": search_result.considered,
        "search_seconds": round(search_result.seconds, 3),
        "strategies": [_row(candidate, workload) for candidate in ranked],
        "lost": search_result.rejected,
    }


def _row(one: Candidate, workload: Workload) -> dict[str, Any]:
    return one.settings | {
        "step_seconds": None if one.time is None else one.time.total,
        "mfu": one.mfu,
        "equal": one.equal,
        "sent_bytes": one.sent_bytes,
        "peak_bytes": one.memory.peak,
        "source": one.memory.source,
        "fits": one.memory.fits,
        "cost": workload.as_json(one.cost(workload)),
    }


def table(ranked: Sequence[Candidate], workload: Workload) -> Table:
    """Return a table with one row for each strategy."""
    from rich.table import Table

    rich_table = Table(box=None, pad_edge=False)
    costs = [name.removeprefix(">") for name in workload.columns]
    for name in (*_TEXT_COLUMNS, *_NUMBER_COLUMNS, *costs, "equal", "source"):
        is_number = name in ("micro", *_NUMBER_COLUMNS, *costs)
        rich_table.add_column(name, justify="right" if is_number else "left", no_wrap=True)
    for candidate in ranked:
        source = candidate.memory.source
        rich_table.add_row(
            str(candidate.mesh),
            *map(candidate.choice, ("zero", "sequence", "schedule")),
            str(candidate.program.batch.microbatches),
            candidate.choice("remat"),
            *candidate.figures,
            *workload.cells(candidate.cost(workload)),
            f"{candidate.equal} more" if candidate.equal else "",
            source if candidate.memory.fits else f"{source}: does not fit",
        )
    return rich_table
