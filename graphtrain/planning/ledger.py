"""Ledger: predicted and measured costs of runs, as JSON lines in the directory of a cache.

Each line is appended with one write, and readers skip truncated lines. Processes can therefore
share a ledger and be killed at any time.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from graphtrain.files import append_line, validate
from lowering.machine.target import machine_of
from sharding_rules.documents import DocumentError, parse_object, read_bytes

_MAX_BYTES = 1 << 30  # of the file; an entry has some 400 bytes
_Cost = Annotated[float, Field(ge=0, lt=1e30)]
StepSource = Literal["estimate", "profile", "speeds"]  # of a predicted step time
QUANTITIES = ("compile_seconds", "step_seconds", "peak_bytes")


@dataclass(frozen=True)
class Costs:
    """Costs of a training step; None if unknown."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    compile_seconds: _Cost | None = None
    step_seconds: _Cost | None = None  # the median over a run
    peak_bytes: _Cost | None = None  # of one device


@dataclass(frozen=True)
class LedgerEntry:
    """Predicted and measured costs of one run."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    target: str
    request: str  # digest of the request key
    when: str  # UTC
    steps: int  # number of measured steps
    stablehlo_bytes: Annotated[int, Field(ge=0, lt=2**63)]  # size of the compiler's input
    predicted: Costs
    measured: Costs
    step_source: StepSource = "estimate"  # of the predicted step_seconds


@dataclass(frozen=True)
class ErrorBar:
    """Ratio of measured to predicted cost, over the runs on one target."""

    median: float
    worst: float  # the ratio farthest from 1, in either direction
    count: int  # number of runs


def ledger_path(store: Path) -> Path:
    """Return the path of a cache's ledger, which removal of cache entries leaves unchanged."""
    return store / "ledger.jsonl"


def append(path: Path, entry: LedgerEntry) -> None:
    """Append one line; first terminate a truncated line of a killed process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    append_line(path, json.dumps(asdict(entry)))


def read(path: Path) -> list[LedgerEntry]:
    """Return all complete entries, oldest first; an empty list if there is no ledger."""
    lines = read_bytes(path, _MAX_BYTES).splitlines() if path.is_file() else []
    return [entry for line in lines if (entry := _parse(line)) is not None]


def _parse(line: bytes) -> LedgerEntry | None:
    """Parse a line; return None if it is truncated, damaged or written by another version."""
    try:
        return validate(LedgerEntry, parse_object(line))
    except DocumentError:
        return None


def error_bars(
    entries: Iterable[LedgerEntry], target: str, step_source: StepSource = "estimate"
) -> dict[str, ErrorBar]:
    """Return the error bar of each quantity that has both predictions and measurements.

    Step times count only where they were predicted from the same source.
    """
    of_target = [entry for entry in entries if entry.target == target]
    bars = {}
    for name in QUANTITIES:
        alike = (
            one for one in of_target if name != "step_seconds" or one.step_source == step_source
        )
        pairs = ((getattr(one.predicted, name), getattr(one.measured, name)) for one in alike)
        ratios = [measured / predicted for predicted, measured in pairs if predicted and measured]
        if ratios:
            worst = max(ratios, key=lambda ratio: abs(math.log(ratio)))
            bars[name] = ErrorBar(statistics.median(ratios), worst, len(ratios))
    return bars


def predict_compile_seconds(
    entries: Sequence[LedgerEntry], target: str, stablehlo_bytes: int
) -> float | None:
    """Predict compile seconds from earlier runs on the same machine; None if there are none.

    Compile time is proportional to the size of the StableHLO, in which the layers are one scanned
    body regardless of their number.
    """
    machine = machine_of(target)
    rates = [
        entry.measured.compile_seconds / entry.stablehlo_bytes
        for entry in entries
        if machine_of(entry.target) == machine
        if entry.measured.compile_seconds and entry.stablehlo_bytes
    ]
    return statistics.median(rates) * stablehlo_bytes if rates else None
