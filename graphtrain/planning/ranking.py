"""Output of a search: table for the terminal, and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from graphtrain.planning.candidates import Candidate
from graphtrain.planning.search import SearchResult

if TYPE_CHECKING:
    from rich.table import Table

_TEXT_COLUMNS = "mesh", "zero", "sequence", "schedule", "micro", "remat"
_NUMBER_COLUMNS = "seconds", "MFU", "GB"


def as_json(found: SearchResult, ranked: Sequence[Candidate]) -> dict[str, Any]:
    """Return the result of a search as JSON; the names contain the units."""
    return {
        "considered": found.considered,
        "search_seconds": round(found.seconds, 3),
        "strategies": [_row(one) for one in ranked],
        "lost": found.rejected,
    }


def _row(one: Candidate) -> dict[str, Any]:
    return one.settings | {
        "step_seconds": one.seconds,
        "mfu": one.mfu,
        "peak_bytes": one.memory.peak,
        "source": one.memory.source,
        "fits": one.memory.fits,
    }


def table(ranked: Sequence[Candidate]) -> Table:
    """Return a table with one row for each strategy."""
    from rich.table import Table

    drawn = Table(box=None, pad_edge=False)
    for name in (*_TEXT_COLUMNS, *_NUMBER_COLUMNS, "source"):
        right = name in ("micro", *_NUMBER_COLUMNS)
        drawn.add_column(name, justify="right" if right else "left", no_wrap=True)
    for one in ranked:
        said = one.memory.source
        drawn.add_row(
            str(one.mesh),
            *map(one.choice, ("zero", "sequence", "schedule")),
            str(one.program.batch.microbatches),
            one.choice("remat"),
            f"{one.seconds:.3f}",
            f"{one.mfu:.1%}",
            f"{one.memory.peak / 1e9:.1f}",
            said if one.memory.fits else f"{said}: does not fit",
        )
    return drawn
