"""Traffic: sums of the collectives of a step, by mesh axes and operation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lowering.hlo.collectives import Collective


@dataclass(frozen=True)
class Traffic:
    """Sum of all collectives of a step with the same mesh axes and operation."""

    axes: str  # as in "fsdp" or "data+fsdp"; "data (DCN)": the part across TPU slices
    op: str
    count: int  # executions in a step
    bytes: int  # sizes of the unsplit arrays of one device's collectives in a step
    wire_bytes: float  # sent by one device in a step


def sum_by_axes(collectives: Iterable[Collective]) -> list[Traffic]:
    """Sum collectives by mesh axes and operation; sort by bytes sent, descending."""
    sums: dict[tuple[str, str], list[float]] = {}
    for collective in collectives:
        across = " (DCN)" if collective.network == "dcn" else ""
        total = sums.setdefault(("+".join(collective.axes) + across, collective.op), [0, 0, 0.0])
        total[0] += collective.count
        total[1] += collective.count * collective.bytes
        total[2] += collective.wire_bytes_per_step
    rows = [
        Traffic(axes, op, int(count), int(total_bytes), wire_bytes)
        for (axes, op), (count, total_bytes, wire_bytes) in sums.items()
    ]
    return sorted(rows, key=lambda row: (-row.wire_bytes, row.axes, row.op))
