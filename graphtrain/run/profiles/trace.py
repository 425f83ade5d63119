"""Reading of XLA's traces: the time of each operation of a program on each device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphtrain.errors import TrainingError

_TPU_LINE = "XLA Ops"  # of a TPU's plane; its events are named by lines of HLO


@dataclass(frozen=True)
class MeasuredOperation:
    """All executions of one operation on one device, over the traced steps."""

    name: str
    device: str
    count: int
    seconds: float


def read_trace(path: Path, program: str) -> list[MeasuredOperation]:
    """Return the operations of a program that a trace has.

    Args:
        path: File of the trace, *.xplane.pb.
        program: Name of the program's module.

    Raises:
        TrainingError: the file is damaged, or has no operation of the program.
    """
    from jax.profiler import ProfileData

    sums: dict[tuple[str, str], tuple[int, float]] = {}
    try:
        for plane in ProfileData.from_file(str(path)).planes:
            for line in plane.lines:
                for name, device, nanoseconds in _events(plane.name, line, program):
                    count, total = sums.get((name, device), (0, 0.0))
                    sums[name, device] = count + 1, total + nanoseconds
    except Exception as error:  # jaxlib raises what its parser does
        raise TrainingError(f"{path}: is no trace of XLA's profiler: {error}") from None
    if not sums:
        raise TrainingError(f"{path}: the trace has no operation of {program}")
    return [
        MeasuredOperation(name, device, count, nanoseconds / 1e9)
        for (name, device), (count, nanoseconds) in sums.items()
    ]


def _events(plane: str, line: Any, program: str) -> Iterator[tuple[str, str, float]]:
    """Return operation, device and nanoseconds of each event of a program."""
    is_tpu = plane.startswith("/device:TPU") and line.name == _TPU_LINE
    for event in line.events:
        stats: Mapping[str, Any] = dict(event.stats)
        if "hlo_op" in stats and stats.get("hlo_module", program).partition("(")[0] == program:
            device = str(stats.get("device_ordinal", plane))
            yield str(stats["hlo_op"]), device, event.duration_ns
        elif is_tpu:
            yield event.name.partition(" = ")[0].lstrip("%"), plane, event.duration_ns
