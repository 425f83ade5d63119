"""Traffic: the collectives of a step added up by mesh axes and operation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lowering.hlo.collectives import Collective


@dataclass(frozen=True)
class Traffic:
    """All collectives of a step along the same mesh axes, of one operation."""

    axes: str  # as in "fsdp" or "data+fsdp"
    op: str
    count: int  # executions in a step
    bytes: int  # handled by one device in a step, in unsplit form
    wire_bytes: float  # sent by one device in a step


def by_axes(collectives: Iterable[Collective]) -> list[Traffic]:
    """One sum for each mesh axes and operation, what sends most first."""
    sums: dict[tuple[str, str], list[float]] = {}
    for one in collectives:
        total = sums.setdefault(("+".join(one.axes), one.op), [0, 0, 0.0])
        total[0] += one.count
        total[1] += one.count * one.bytes
        total[2] += one.wire_bytes_per_step
    rows = [
        Traffic(axes, op, int(count), int(handled), sent)
        for (axes, op), (count, handled, sent) in sums.items()
    ]
    return sorted(rows, key=lambda row: (-row.wire_bytes, row.axes, row.op))
