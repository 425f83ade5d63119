"""Facts that callbacks get of a run, and the summary that a run returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphtrain.compile.html import html_facts
from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema import Config
from graphtrain.planning.parameters import ParameterCount

Metrics = Mapping[str, Any]  # by name, as in metrics.jsonl


@dataclass(frozen=True)
class RunStart:
    """Beginning of a run, or of its continuation."""

    config: Config
    directory: Path
    step: int  # of the checkpoint from which the run resumes; 0 for a new run
    parameters: ParameterCount
    program: ResolvedProgram | None = None  # that trains, if it is one of run.fallback


@dataclass(frozen=True)
class RunSummary:
    """Outcome of a run."""

    directory: Path
    steps: int  # in total, including those before a resumption
    resumed_from: int | None  # step of the checkpoint; None for a new run
    validation_loss: float | None  # of the last evaluation
    stopped_by: str | None  # name of the signal that stopped it, for example "SIGTERM"
    best_step: int | None = None  # step of the lowest validation loss
    stopped_early: bool = False  # run.early_stopping_patience evaluations were not lower
    exported: Path | None = None  # folder of run.export

    def _repr_html_(self) -> str:
        facts = vars(self) | {"resumed_from": self.resumed_from or None}
        return html_facts("run", facts)
