"""A step that was started: its metrics, and what the journal records of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from graphtrain.graphs.names import SPIKE
from graphtrain.run.metrics import Record
from graphtrain.run.spikes import Limits
from lowering.trees import Tree

_COMMON_METRICS = ("loss", "grad_norm", "targets")  # metrics of every loss function


def is_overflow(metrics: Mapping[str, Any]) -> bool:
    """Return whether a step was skipped because its gradients overflowed by their scale.

    At a loss scale of 1 or less the scale is not the reason.
    """
    return (
        not math.isfinite(float(metrics["grad_norm"])) and float(metrics.get("loss_scale", 0)) > 1
    )


def if_finite(value: float | None) -> float | None:
    """Return a metric as JSON has it: None if it is not finite."""
    return value if value is not None and math.isfinite(value) else None


@dataclass(frozen=True)
class PendingStep:
    """A step that was started, and whose metrics are not read yet.

    All but `is_complete` wait until it is computed.
    """

    number: int
    metrics: Tree  # on the devices
    learning_rate: float
    waited: float  # seconds for its batch
    is_late: bool  # no step was being computed when the batch came
    limits: Limits

    @property
    def is_complete(self) -> bool:
        loss = self.metrics["loss"]
        return loss.is_ready() if hasattr(loss, "is_ready") else True

    @cached_property
    def loss(self) -> float:
        return float(self.metrics["loss"])

    @cached_property
    def grad_norm(self) -> float:
        return float(self.metrics["grad_norm"])

    @cached_property
    def is_overflow(self) -> bool:
        return is_overflow(self.metrics)

    @cached_property
    def is_spike(self) -> bool:
        return not self.is_overflow and self.limits.exceeded_by(self.metrics)

    def record(self) -> Record:
        """Return the metrics as the journal records them."""
        extra: dict[str, float | int | None] = {
            name: float(self.metrics[name]) for name in self.metrics if name not in _COMMON_METRICS
        }
        if SPIKE in self.metrics:
            extra[SPIKE] = int(self.is_spike)
        if self.is_spike or self.is_overflow:
            extra = {name: if_finite(value) for name, value in extra.items()}
        if "skipped_steps" in self.metrics:
            extra["skipped_steps"] = int(self.metrics["skipped_steps"])
        return {
            "step": self.number,
            "loss": if_finite(self.loss),
            "grad_norm": if_finite(self.grad_norm),
            **extra,
            "learning_rate": self.learning_rate,
            "targets": int(self.metrics["targets"]),
        }
