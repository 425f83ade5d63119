"""What a search found, for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from graphtrain.planning.candidates import Candidate
from graphtrain.planning.search import Found
from graphtrain.planning.verify import Verified

if TYPE_CHECKING:
    from rich.table import Table


def rows(found: Found, verified: Sequence[Verified]) -> list[dict[str, Any]]:
    """A row for each strategy, fastest first: those that were compiled, then the estimates."""
    compiled = {id(one.candidate) for one in verified}
    estimates = (one for one in found.ranked if id(one) not in compiled)
    return [_verified(one) for one in verified] + [_row(one) for one in estimates]


def as_json(found: Found, verified: Sequence[Verified], target: str) -> dict[str, Any]:
    """Everything for programs; units are in the names."""
    strategies = rows(found, verified)
    first = strategies[0] if strategies and strategies[0]["fits"] else None
    return {
        "target": target,
        "considered": found.considered,
        "search_seconds": round(found.seconds, 3),
        "strategies": strategies,
        "best": first and first["settings"],
        "lost": found.lost,
    }


def table(ranked: Sequence[dict[str, Any]]) -> Table:
    """The strategies of rows, a line for each."""
    from rich.table import Table

    drawn = Table(box=None, pad_edge=False)
    for name in ("", "mesh", "zero", "sequence", "schedule", "microbatches", "remat"):
        drawn.add_column(name, no_wrap=True)
    for name in ("step s", "MFU", "peak GB", "fits", "says"):
        drawn.add_column(name, justify="right", no_wrap=True)
    for number, row in enumerate(ranked, 1):
        drawn.add_row(
            str(number),
            *(str(row[name]) for name in ("mesh", "zero", "sequence", "schedule")),
            str(row["microbatches"]),
            row["remat"],
            f"{row['step_seconds']:.3g}",
            f"{row['mfu']:.1%}",
            f"{row['peak_bytes'] / 1e9:.1f}",
            "yes" if row["fits"] else "no",
            row["says"],
        )
    return drawn


def _verified(one: Verified) -> dict[str, Any]:
    said = one.assessment
    return _row(one.candidate) | {
        "step_seconds": said.time.total,
        "peak_bytes": said.memory.peak,
        "mfu": said.mfu,
        "fits": said.memory.fits,
        "says": said.memory.source,
        "remark": said.remark,
        "estimated_step_seconds": one.candidate.seconds,
        "estimated_peak_bytes": one.candidate.memory.peak,
    }


def _row(one: Candidate) -> dict[str, Any]:
    return {
        "mesh": str(one.mesh),
        **{name: one.choice(name) for name in ("zero", "sequence", "schedule", "remat")},
        "microbatches": one.program.batch.microbatches,
        "step_seconds": one.seconds,
        "peak_bytes": one.memory.peak,
        "mfu": one.mfu,
        "fits": one.memory.fits,
        "says": "estimate",
        "settings": one.settings,
    }
