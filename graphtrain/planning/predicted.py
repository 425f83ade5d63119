"""Predicted costs of a step by its compiled program, or by arithmetic if none is cached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from graphtrain.cache import Cache
from graphtrain.compile.request_keys import request_keys
from graphtrain.config.resolve import ResolvedProgram
from graphtrain.cost_model.assessment import StepTime
from graphtrain.cost_model.compute import compiled_excess, expected_excess
from graphtrain.cost_model.memory import memory
from graphtrain.cost_model.padded_stages import with_padding_layers
from graphtrain.cost_model.profiled_time import with_profile
from graphtrain.cost_model.time import moved_bytes, step_time
from graphtrain.cost_model.traffic import bubble_of, predict_collectives
from graphtrain.models.attention.kernel_support import step_uses_flash_kernel
from lowering.hlo.collectives import Collective, merged


@dataclass(frozen=True)
class PredictedStep:
    """Predicted costs of a training step."""

    target: str
    source: Literal["compiler", "estimate"]  # of memory and collectives
    seconds: float | None  # None: unknown
    is_complete: bool  # whether the seconds have all parts; else they are a lower bound
    peak_bytes: float  # of one device


def predict_step(program: ResolvedProgram, cache: Cache) -> PredictedStep:
    """Predict a step from the record of its compiled program, or by arithmetic if there is none."""
    record = _stored_record(program, cache)
    time = predicted_time(program, record)
    if record is not None:
        peak = float(record["memory"]["peak"])
    else:
        peak = float(memory(with_padding_layers(program)).peak)
    source = "estimate" if record is None else "compiler"
    return PredictedStep(program.settings.target, source, time.total, time.is_complete, peak)


def predicted_time(program: ResolvedProgram, record: Mapping[str, Any] | None) -> StepTime:
    """Return the time of a step, by the record of its compiled program; None: by arithmetic."""
    padded_program = with_padding_layers(program)
    flash, bubble = step_uses_flash_kernel(padded_program), bubble_of(program)
    excess = expected_excess(program, flash=flash)
    if record is None:
        collectives = merged(predict_collectives(padded_program))
    else:
        collectives = [Collective.from_record(entry) for entry in record["collectives"]]
        if flops := record.get("flops"):
            excess = compiled_excess(padded_program, flops, flash=flash, bubble=bubble)
    held = memory(padded_program)
    time = step_time(padded_program, held, collectives, bubble, flash=flash, excess=excess)
    moved = partial(moved_bytes, padded_program, held, flash)
    return with_profile(time, padded_program, collectives, record, moved)


def _stored_record(program: ResolvedProgram, cache: Cache) -> Mapping[str, Any] | None:
    """Return the record of the compiled step, without reading its executable; None without one."""
    request = request_keys(program, ["train"])["train"].digest
    digest = cache.stored_programs([request]).get(request)
    return None if digest is None else cache.describe(digest)["record"]
