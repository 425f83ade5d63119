"""Measured time and memory of a run, for the ledger that calibrates plans."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lowering
from graphtrain.cache import Cache
from graphtrain.config.schema import Run
from graphtrain.cost_model.native_equivalent import sizes_unknown
from graphtrain.run.metrics import read_journal
from graphtrain.run.phases import PhasePrograms, PhaseSequence
from sharding_rules.errors import UserError


def record_measurements(
    run: Run, cache: Cache, phases: PhaseSequence, start: int, baseline_bytes: int
) -> None:
    """Record the measured time and memory in the ledger, however the run ended.

    The ledger calibrates the estimates of graphtrain plan. A failure to write it is a warning.
    """
    steps = [record for record in read_journal(Path(run.directory)) if record["step"] > start]
    of_phases = [
        (one, of_phase)
        for one in phases.phases
        if (of_phase := [record for record in steps if one.phase.holds(record["step"])])
    ]
    for one, of_phase in of_phases:
        # The peak memory is that of the largest phase, which is not known.
        _record_phase(run, cache, one, of_phase, baseline_bytes if len(of_phases) == 1 else None)


def _record_phase(
    run: Run,
    cache: Cache,
    phase: PhasePrograms,
    steps: Sequence[dict[str, Any]],
    baseline_bytes: int | None,
) -> None:
    from graphtrain.planning.measured import record_run

    program = phase.phase.program
    if sizes_unknown(program.settings):
        return
    target = program.target
    peak = lowering.backend(target).peak_memory()
    # CPU devices share the memory of the process, part of which was in use before training.
    device_bytes = peak
    if baseline_bytes is None or run.samples is not None or run.tasks is not None:
        device_bytes = None  # samples and tasks may take more than the step
    elif target.runs_on_cpu:
        device_bytes = (peak - baseline_bytes) / target.devices
    try:
        record_run(cache.root, program, phase.programs["train"].record, steps, device_bytes)
    except (OSError, UserError) as error:
        warnings.warn(
            f"the measurements of this run were not recorded in the ledger of the cache: {error}",
            stacklevel=1,
        )
