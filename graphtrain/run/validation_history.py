"""Validation losses of a run so far: the lowest of them, and whether it is time to stop."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from graphtrain.run.metrics import read_journal
from lowering.xla import distributed


class ValidationHistory:
    """Validation loss by step.

    Args:
        losses: Validation loss of each evaluated step, in the order of the steps.
    """

    def __init__(self, losses: Mapping[int, float]) -> None:
        self._losses = dict(losses)

    def add(self, step: int, loss: float) -> bool:
        """Add the result of an evaluation; return whether it is lower than all before it."""
        others = [other for at, other in self._losses.items() if at != step]
        self._losses[step] = loss
        return math.isfinite(loss) and loss < min(others, default=math.inf)

    @property
    def best_step(self) -> int | None:
        """Step of the lowest loss; None before the first evaluation with a finite one."""
        finite = [step for step, loss in self._losses.items() if math.isfinite(loss)]
        return min(finite, key=self._losses.__getitem__, default=None)

    def has_stalled(self, patience: int | None) -> bool:
        """Return whether the last `patience` evaluations were not lower than one before them."""
        if patience is None or self.best_step is None:
            return False
        return sum(step > self.best_step for step in self._losses) >= patience


def recorded_history(directory: Path, until: int) -> ValidationHistory:
    """Read the history up to a step from the journal of a run. All ranks get that of rank 0."""
    journal = read_journal(directory) if until and distributed.rank() == 0 else []
    losses = {
        record["step"]: math.nan if (loss := record["validation_loss"]) is None else loss
        for record in journal
        if "validation_loss" in record and record["step"] <= until
    }
    text = distributed.all_gather_text(json.dumps(losses))[0]
    return ValidationHistory({int(step): loss for step, loss in json.loads(text).items()})
