"""Metrics of a run as columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from graphtrain.compile.html import html_table
from graphtrain.errors import TrainingError
from graphtrain.run.metrics import read_journal

if TYPE_CHECKING:
    import pandas

_SHOWN = ("step", "loss", "grad_norm", "learning_rate", "tokens_per_second")
_ROWS = 10  # in a notebook


@dataclass(frozen=True, eq=False)
class Metrics:
    """Metrics of a run, one array for each name, as metrics.jsonl has them.

    The arrays of `training` have one value for each step, those of `validation` one for each
    evaluation. What was not measured is NaN.
    """

    training: Mapping[str, np.ndarray]
    validation: Mapping[str, np.ndarray]

    @property
    def step(self) -> np.ndarray:
        """Number of each training step."""
        return self.training["step"]

    @property
    def loss(self) -> np.ndarray:
        """Training loss of each step."""
        return self.training["loss"]

    def to_pandas(self) -> pandas.DataFrame:
        """Return one row for each step, with the evaluation after it, if there is one.

        Raises:
            ImportError: pandas is not installed.
        """
        import pandas

        training, validation = (pandas.DataFrame(dict(one)) for one in self._tables())
        return training.merge(validation, on="step", how="outer").set_index("step")

    def _tables(self) -> tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray]]:
        return self.training, self.validation

    def _repr_html_(self) -> str:
        names = [name for name in _SHOWN if name in self.training]
        rows = zip(*(self.training[name][-_ROWS:] for name in names), strict=True)
        losses = zip(*self.validation.values(), strict=True)
        return (
            f"<p>{len(self.step)} steps, {len(self.validation['step'])} evaluations</p>"
            + html_table(names, ([f"{value:.6g}" for value in row] for row in rows))
            + html_table(
                tuple(self.validation), ([f"{value:.6g}" for value in row] for row in losses)
            )
        )


def read_metrics(directory: Path) -> Metrics:
    """Read the metrics of a run.

    Raises:
        TrainingError: the run has no metrics.
    """
    records = read_journal(directory)
    if not records:
        raise TrainingError(f"{directory} has no metrics.jsonl with records: no step was taken")
    evaluations = [record for record in records if "validation_loss" in record]
    steps = [record for record in records if "validation_loss" not in record]
    return Metrics(_columns(steps, ("step", "loss")), _columns(evaluations, _OF_EVALUATIONS))


_OF_EVALUATIONS = ("step", "validation_loss")


def _columns(
    records: Sequence[Mapping[str, Any]], required: Sequence[str]
) -> dict[str, np.ndarray]:
    """Return the values of each name in order; NaN where a record has none."""
    names = dict.fromkeys((*required, *(name for record in records for name in record)))
    return {
        name: np.array([record["step"] for record in records], np.int64)
        if name == "step"
        else np.array([_number(record.get(name)) for record in records], np.float64)
        for name in names
    }


def _number(value: float | None) -> float:
    return np.nan if value is None else value
