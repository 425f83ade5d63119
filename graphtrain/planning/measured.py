"""Append measured and predicted costs of a run to the ledger, without tracing the model."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from graphtrain.cache.programs import timestamp
from graphtrain.compile.request_keys import request_keys
from graphtrain.config.resolve import ResolvedProgram
from graphtrain.cost_model.compute import compiled_excess, expected_excess
from graphtrain.cost_model.memory import memory
from graphtrain.cost_model.padded_stages import with_padding_layers
from graphtrain.cost_model.time import step_time
from graphtrain.cost_model.traffic import bubble_of
from graphtrain.models.attention.kernel_support import step_uses_flash_kernel
from graphtrain.planning import ledger
from graphtrain.planning.ledger import Costs, LedgerEntry
from lowering.hlo.collectives import Collective


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
    entry = LedgerEntry(
        target=program.settings.target,
        request=request_keys(program)["train"].digest,
        when=timestamp(),
        steps=len(step_seconds),
        stablehlo_bytes=record["stablehlo_bytes"],
        predicted=_predicted(path, program, record),
        measured=Costs(
            compile_seconds=record["compile_seconds"],
            step_seconds=statistics.median(step_seconds) if step_seconds else None,
            peak_bytes=peak_bytes,
        ),
    )
    ledger.append(path, entry)


def _predicted(path: Path, program: ResolvedProgram, record: Mapping[str, Any]) -> Costs:
    """Return the costs that a plan predicts for the same compiled program."""
    size = record["stablehlo_bytes"]
    collectives = [Collective.from_record(entry) for entry in record["collectives"]]
    padded_program = with_padding_layers(program)
    estimated_memory, flash = memory(padded_program), step_uses_flash_kernel(padded_program)
    bubble, excess = bubble_of(program), expected_excess(program, flash=flash)
    if flops := record.get("flops"):
        excess = compiled_excess(padded_program, flops, flash=flash, bubble=bubble)
    time = step_time(
        padded_program, estimated_memory, collectives, bubble, flash=flash, excess=excess
    )
    return Costs(
        compile_seconds=ledger.predict_compile_seconds(
            ledger.read(path), program.settings.target, size
        ),
        step_seconds=time.total,
        peak_bytes=record["memory"]["peak"],
    )
