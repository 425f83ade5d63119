"""Append measured and predicted costs of a run to the ledger, without tracing the model."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from graphtrain.cache.programs import timestamp
from graphtrain.config.schema import Program
from graphtrain.estimates.filler import with_filler
from graphtrain.estimates.memory import memory
from graphtrain.estimates.time import step_time
from graphtrain.estimates.traffic import bubble_of
from graphtrain.models.kernels import in_step
from graphtrain.planning import ledger
from graphtrain.planning.ledger import Costs, Entry
from graphtrain.requests import mesh_shape, request_keys
from lowering.collectives import Collective
from sharding_rules.rules import Rules


def add_run(
    store: Path,
    program: Program,
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
    spent = [one["step_seconds"] for one in journal if "step_seconds" in one][1:]
    entry = Entry(
        target=program.target,
        request=request_keys(program)["train"].digest,
        when=timestamp(),
        steps=len(spent),
        stablehlo_bytes=record["stablehlo_bytes"],
        predicted=_predicted(path, program, record),
        measured=Costs(
            compile_seconds=record["compile_seconds"],
            step_seconds=statistics.median(spent) if spent else None,
            peak_bytes=peak_bytes,
        ),
    )
    ledger.append(path, entry)


def _predicted(path: Path, program: Program, record: Mapping[str, Any]) -> Costs:
    """Return the costs that a plan predicts for the same compiled program."""
    mesh, size = mesh_shape(program), record["stablehlo_bytes"]
    collectives = [Collective.from_record(one) for one in record["collectives"]]
    filled = with_filler(program)
    rules = Rules.load(program.rules)
    held, flash = memory(filled, rules, mesh), in_step(filled, rules, mesh)
    time = step_time(filled, mesh, held, collectives, bubble_of(program, mesh), flash=flash)
    return Costs(
        compile_seconds=ledger.predict_compile_seconds(ledger.read(path), program.target, size),
        step_seconds=time.total,
        peak_bytes=record["memory"]["peak"],
    )
