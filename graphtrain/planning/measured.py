"""Append measured and predicted costs of a run to the ledger, without tracing the model."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from graphtrain.cache.programs import timestamp
from graphtrain.compile.request_keys import request_keys
from graphtrain.config.resolve import ResolvedProgram
from graphtrain.planning import ledger
from graphtrain.planning.ledger import Costs, LedgerEntry
from graphtrain.planning.predicted import predicted_time


def record_run(
    store: Path,
    program: ResolvedProgram,
    record: Mapping[str, Any],
    journal: Sequence[Mapping[str, Any]],
    peak_bytes: float | None,
) -> None:
    """Append a run to the ledger of a store.

    Args:
        store: directory of the cache.
        program: the program of the run.
        record: record of the compiled training step.
        journal: metrics of the steps of this run; the first one is a warm-up and is not counted.
        peak_bytes: peak memory of one device.

    Raises:
        OSError: the ledger cannot be written.
    """
    path = ledger.ledger_path(store)
    step_seconds = [metrics["step_seconds"] for metrics in journal if "step_seconds" in metrics][1:]
    time = predicted_time(program, record)
    entry = LedgerEntry(
        target=program.settings.target,
        request=request_keys(program)["train"].digest,
        when=timestamp(),
        steps=len(step_seconds),
        stablehlo_bytes=record["stablehlo_bytes"],
        predicted=_predicted(path, program, record, time.total),
        measured=Costs(
            compile_seconds=record["compile_seconds"],
            step_seconds=statistics.median(step_seconds) if step_seconds else None,
            peak_bytes=peak_bytes,
        ),
        step_source="estimate" if time.measured is None else "profile",
    )
    ledger.append(path, entry)


def _predicted(
    path: Path, program: ResolvedProgram, record: Mapping[str, Any], step_seconds: float | None
) -> Costs:
    """Return the costs that a plan predicts for the same compiled program."""
    return Costs(
        compile_seconds=ledger.predict_compile_seconds(
            ledger.read(path), program.settings.target, record["stablehlo_bytes"]
        ),
        step_seconds=step_seconds,
        peak_bytes=record["memory"]["peak"],
    )
