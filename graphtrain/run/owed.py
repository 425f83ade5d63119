"""Evaluations that an earlier start of a run gave up, and that a resumed one repeats."""

from __future__ import annotations

from pathlib import Path

from graphtrain.config.schema import Run
from graphtrain.run.metrics import has_scores, read_journal
from graphtrain.run.periodic_evaluations import are_scores_due, is_evaluation_due
from lowering.xla import distributed


def is_evaluation_owed(run: Run, start: int) -> bool:
    """Return whether the evaluation after step `start` is due, but the journal has no result.

    A run that is stopped during an evaluation gives it up. All ranks decide as rank 0 does.
    """
    if run.data.validation is None or not is_evaluation_due(run, start):
        return False
    journal = read_journal(Path(run.directory)) if distributed.rank() == 0 else []
    is_recorded = any(record["step"] == start and "validation_loss" in record for record in journal)
    return not distributed.all_gather_text("recorded" if is_recorded else "")[0]


def are_scores_owed(run: Run, start: int) -> bool:
    """Return whether the scores after step `start` are due, but the journal has none."""
    if not are_scores_due(run, start):
        return False
    journal = read_journal(Path(run.directory)) if distributed.rank() == 0 else []
    is_recorded = any(record["step"] == start and has_scores(record) for record in journal)
    return not distributed.all_gather_text("recorded" if is_recorded else "")[0]
