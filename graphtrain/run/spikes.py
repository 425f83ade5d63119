"""Spikes: steps whose loss or gradient norm is above its limit, and the record of them."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from graphtrain.checkpoints.output_directory import write_errors
from graphtrain.config.schema import Spikes
from graphtrain.files import append_line
from graphtrain.graphs.names import SPIKE
from lowering.trees import Tree
from lowering.xla import distributed
from sharding_rules.documents import DocumentError, read_bytes

NAME = "spikes.jsonl"
_LAG = 2  # the limits of a step are known while the step before it is computed
_MAX_BYTES = 1 << 30


@dataclass(frozen=True)
class Limits:
    """Largest loss and gradient norm of a step that is no spike, exact in float32."""

    loss: float = math.inf
    grad_norm: float = math.inf

    def arrays(self) -> Tree:
        """Return the limits as an input of a training step."""
        return {name: np.float32(value) for name, value in asdict(self).items()}

    def exceeded_by(self, metrics: Mapping[str, Any]) -> bool:
        """Return whether a step is a spike; if its program decided that, what it decided."""
        if SPIKE in metrics:
            return float(metrics[SPIKE]) > 0
        loss, norm = float(metrics["loss"]), float(metrics["grad_norm"])
        is_finite = math.isfinite(loss) and math.isfinite(norm)
        return not (is_finite and loss <= self.loss and norm <= self.grad_norm)

    def describe(self) -> str:
        """Describe the limits that there are."""
        limits = {"loss": self.loss, "gradient norm": self.grad_norm}
        said = [f"{name} {limit:.6g}" for name, limit in limits.items() if math.isfinite(limit)]
        return ", ".join(said) or "finite values"


class SpikeWindow:
    """Losses of the last steps that were no spikes, from which the limits of a step follow.

    The limits depend on completed steps alone, so that a resumed run has the same.
    """

    def __init__(self, settings: Spikes, saved: Mapping[str, Any] | None = None) -> None:
        """Begin without losses, or with those of a checkpoint."""
        self._settings = settings
        losses = [] if saved is None else saved["losses"]
        self._losses = deque(map(tuple, losses), maxlen=settings.window + _LAG - 1)
        self._consecutive = 0 if saved is None else saved["consecutive"]

    def limits(self, step: int) -> Limits:
        """Return the limits of a step."""
        zscore, window = self._settings.loss_zscore, self._settings.window
        norm = self._settings.grad_norm
        losses = [loss for of_step, loss in self._losses if of_step <= step - _LAG][-window:]
        limit = math.inf
        if zscore is not None and len(losses) == window:
            limit = float(np.mean(losses) + zscore * np.std(losses))
        return Limits(_float32(limit), math.inf if norm is None else _float32(norm))

    def accept(self, step: int, loss: float) -> None:
        """Add the loss of a step that is no spike."""
        self._consecutive = 0
        if self._settings.loss_zscore is not None:
            self._losses.append((step, loss))

    def skip(self) -> bool:
        """Count a skipped step; return whether there were too many in a row."""
        self._consecutive += 1
        return self._consecutive > self._settings.max_consecutive

    def state(self) -> dict[str, Any]:
        """Return the losses as JSON, for a checkpoint."""
        return {"losses": [list(one) for one in self._losses], "consecutive": self._consecutive}


def _float32(value: float) -> float:
    return float(np.float32(value))


@dataclass(frozen=True)
class SpikeRecord:
    """A spike, as a line of spikes.jsonl."""

    step: int
    on_spike: str
    loss: float | None  # None: not finite
    grad_norm: float | None
    loss_limit: float | None  # None: there was none
    grad_norm_limit: float | None
    documents: dict[str, list[int]]  # of the batch, by dataset
    checkpoint: int | None = None  # rewind: step from which the run goes on; 0: its beginning
    data: dict[str, Any] | None = None  # rewind: where the data goes on there


class RewindRun(Exception):
    """The run returns to its last checkpoint. Caught by `train`; no user sees it."""

    def __init__(self, record: SpikeRecord) -> None:
        super().__init__(f"rewound from step {record.step} to step {record.checkpoint}")


def write_spike(directory: Path, record: SpikeRecord) -> None:
    """Append a spike to spikes.jsonl in the directory of a run.

    Raises:
        TrainingError: it cannot be written.
    """
    with write_errors(directory):
        append_line(directory / NAME, json.dumps(asdict(record), allow_nan=False))


def rewinds_to(directory: Path, step: int) -> list[dict[str, Any]]:
    """Return the positions of the data after each rewind to a checkpoint, oldest first.

    Every rank gets what rank 0 reads.
    """
    positions = _rewinds_to(directory, step) if distributed.rank() == 0 else []
    return json.loads(distributed.all_gather_text(json.dumps(positions))[0])


def _rewinds_to(directory: Path, step: int) -> list[dict[str, Any]]:
    positions = []
    for line in _lines(directory / NAME):
        if line.get("on_spike") == "rewind" and line.get("checkpoint") == step:
            positions.append(line["data"])
    return positions


def _lines(path: Path) -> Sequence[dict[str, Any]]:
    """Return the records of a file; a line that was written only in part is none."""
    try:
        content = read_bytes(path, _MAX_BYTES) if path.exists() else b""
    except (OSError, DocumentError):
        return []
    records = []
    for line in content.splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and isinstance(record.get("data"), dict | None):
            records.append(record)
    return records
