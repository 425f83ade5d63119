"""Model FLOPs utilization (MFU) of the steps of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.cost_model.native_equivalent import sizes_unknown
from graphtrain.cost_model.product_peaks import step_peak
from graphtrain.cost_model.tower import useful_step_flops


def flops_per_token(program: ResolvedProgram, record: Mapping[str, Any]) -> dict[str, float]:
    """Return the useful FLOPs per token, by the name of the metric; empty if they are unknown.

    Args:
        program: The program.
        record: Record of its compiled training step, which counts those of imported models.
    """
    if sizes_unknown(program.settings):
        return record.get("flops_per_token", {})
    return useful_step_flops(program.settings)


def utilization(
    program: ResolvedProgram, flops: Mapping[str, float], tokens_per_second: float
) -> dict[str, float | None]:
    """Return the metrics of utilization; None if FLOPs or the peak are unknown."""
    peak = step_peak(program)
    return {
        name: round(flops[name] * tokens_per_second / peak, 6) if peak and flops else None
        for name in ("mfu", "mfu_causal")
    }
