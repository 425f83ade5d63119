"""The ledger: what runs were predicted to take and what they took, as JSON lines beside a store.

A line is appended by one write, and one cut short by a kill is passed over by every reader, so
processes may share a ledger and die at any moment.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

QUANTITIES = ("compile_seconds", "step_seconds", "peak_bytes")


@dataclass(frozen=True)
class Costs:
    """What a training step takes; None is not known."""

    compile_seconds: float | None = None
    step_seconds: float | None = None  # the median over a run
    peak_bytes: float | None = None  # of one device


@dataclass(frozen=True)
class Entry:
    """One run."""

    target: str
    request: str  # digest of what was asked for
    when: str  # UTC
    steps: int  # that were measured
    stablehlo_bytes: int  # what the compiler was given
    predicted: Costs
    measured: Costs


@dataclass(frozen=True)
class ErrorBar:
    """Measured over predicted, in the runs of one target."""

    median: float
    worst: float  # the ratio farthest from 1, whichever way
    count: int


def ledger_path(store: Path) -> Path:
    """The ledger of a store of compiled programs; nothing that cleans the store touches it."""
    return store / "ledger.jsonl"


def append(path: Path, entry: Entry) -> None:
    """Add one line, after ending a line that a killed process left."""
    line = json.dumps(asdict(entry)) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = "\n" + line
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def read(path: Path) -> list[Entry]:
    """All whole lines, oldest first; none where there is no ledger."""
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return [entry for line in lines if (entry := _parse(line)) is not None]


def _parse(line: str) -> Entry | None:
    """An entry, or None for a line cut short or written by another version."""
    try:
        fields = json.loads(line)
        predicted, measured = (Costs(**fields.pop(name)) for name in ("predicted", "measured"))
        return Entry(predicted=predicted, measured=measured, **fields)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def error_bars(entries: Iterable[Entry], target: str) -> dict[str, ErrorBar]:
    """By quantity, how far the predictions for a target were off; without those never compared."""
    of_target = [entry for entry in entries if entry.target == target]
    bars = {}
    for name in QUANTITIES:
        pairs = ((getattr(one.predicted, name), getattr(one.measured, name)) for one in of_target)
        ratios = [measured / predicted for predicted, measured in pairs if predicted and measured]
        if ratios:
            worst = max(ratios, key=lambda ratio: abs(math.log(ratio)))
            bars[name] = ErrorBar(statistics.median(ratios), worst, len(ratios))
    return bars


def predict_compile_seconds(
    entries: Sequence[Entry], target: str, stablehlo_bytes: int
) -> float | None:
    """Seconds to compile a program, from earlier ones for the same machine; None without any.

    Time grows with the text, since the layers are one scanned body whatever their number.
    """
    machine = target.partition(":")[0]
    rates = [
        entry.measured.compile_seconds / entry.stablehlo_bytes
        for entry in entries
        if entry.target.partition(":")[0] == machine
        if entry.measured.compile_seconds and entry.stablehlo_bytes
    ]
    return statistics.median(rates) * stablehlo_bytes if rates else None
