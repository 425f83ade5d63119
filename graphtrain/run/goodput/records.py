"""Lines of goodput.jsonl, read back as the processes of a run."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graphtrain.errors import TrainingError
from graphtrain.files import counted
from graphtrain.run.goodput.activities import BUCKET_OF_ACTIVITY
from graphtrain.run.goodput.timeline import NAME
from sharding_rules.documents import DocumentError, read_bytes

_MAX_BYTES = 4 << 30  # a line has some 130 bytes
_MAX_TIME = 1e11  # Unix time; some year that no run reaches
_CLOCKS_DIFFER = 86400.0  # seconds by which a host's clock may be ahead


@dataclass(frozen=True)
class Interval:
    """Time that a process spent in one activity, up to `end`."""

    activity: str
    end: float  # Unix time
    seconds: float
    step: int  # last step that was complete at the end
    steps: int = 0  # number that became complete
    late: int = 0  # number of those whose batch came when no step was computing any more
    late_seconds: float = 0.0  # waited for these batches


@dataclass
class ProcessRecord:
    """Everything that rank 0 of one start of a run recorded."""

    name: str
    host: str = ""
    started_at: float | None = None  # None if the line is lost
    first_step: int | None = None  # step from which it trained; None if it did not come so far
    compile_seconds: Mapping[str, float] = field(default_factory=dict)  # by graph
    outcome: str | None = None  # "completed", "stopped by ...", "error: ..."; None: killed or lost
    intervals: list[Interval] = field(default_factory=list)
    ended_at: float = 0.0  # time of the last line

    @property
    def began_at(self) -> float:
        """Start of the process, or of the first interval that is known of it."""
        if self.started_at is not None:
            return self.started_at
        first = self.intervals[0] if self.intervals else None
        return self.ended_at if first is None else first.end - first.seconds


@dataclass(frozen=True)
class Records:
    """Processes of a run in the order of their starts."""

    processes: list[ProcessRecord]
    damaged_lines: int


def read_processes(directory: Path) -> Records:
    """Return what the processes of a run recorded; damaged lines are counted and left out.

    Raises:
        TrainingError: no start was recorded, or it cannot be read.
    """
    path = directory / NAME
    if not path.is_file():
        raise TrainingError(
            f"{path}: no such file; graphtrain run writes it when the first step has been started"
        )
    try:
        content = read_bytes(path, _MAX_BYTES)
    except (OSError, DocumentError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise TrainingError(f"{path}: cannot be read: {reason}") from None
    records = parse(content, time.time() + _CLOCKS_DIFFER)
    if not any(one.started_at is not None for one in records.processes):
        damaged = counted(records.damaged_lines, "damaged line")
        raise TrainingError(
            f"{path}: no start of a run is recorded in it ({damaged}); graphtrain run writes it "
            "when the first step has been started"
        )
    return records


def parse(content: bytes, latest: float = _MAX_TIME) -> Records:
    """Parse the content of goodput.jsonl, whose lines are not later than a Unix time."""
    processes: dict[str, ProcessRecord] = {}
    damaged = 0
    for line in content.splitlines():
        if not line:
            continue
        try:
            _add(processes, json.loads(line), latest)
        except (ValueError, TypeError, KeyError, RecursionError):
            damaged += 1
    return Records(sorted(processes.values(), key=lambda one: one.began_at), damaged)


def _add(processes: dict[str, ProcessRecord], line: Mapping[str, Any], latest: float) -> None:
    """Add a line to its process.

    Raises:
        ValueError, TypeError, KeyError: it is no line that a timeline writes.
    """
    name, at = _text(line["process"]), _number(line["at"], latest)
    if "activity" in line:
        interval = _interval(line, at)
        process = processes.setdefault(name, ProcessRecord(name))
        process.intervals.append(interval)
    else:
        change = _change(line, at)
        process = processes.setdefault(name, ProcessRecord(name))
        for field_name, value in change.items():
            setattr(process, field_name, value)
    process.ended_at = max(process.ended_at, at)


def _interval(line: Mapping[str, Any], at: float) -> Interval:
    if line["activity"] not in BUCKET_OF_ACTIVITY:
        raise ValueError("unknown activity")
    return Interval(
        line["activity"],
        at,
        _number(line["seconds"], at),
        _count(line["step"]),
        _count(line.get("steps", 0)),
        _count(line.get("late", 0)),
        _number(line.get("late_seconds", 0.0), at),
    )


def _change(line: Mapping[str, Any], at: float) -> dict[str, Any]:
    """Return the fields of a process that an event sets."""
    if line["event"] == "start":
        return {"started_at": at, "host": _text(line["host"])}
    if line["event"] == "begin":
        seconds = dict(line["compile_seconds"])
        return {
            "first_step": _count(line["step"]),
            "compile_seconds": {
                _text(graph): _number(s, _MAX_TIME) for graph, s in seconds.items()
            },
        }
    if line["event"] == "end":
        return {"outcome": _text(line["outcome"])}
    raise ValueError("unknown event")


def _number(value: Any, most: float) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or not 0 <= value <= most:
        raise ValueError("not a number in its range")
    return float(value)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError("not a count")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("not a text")
    return value
