"""Metrics of a run as columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from graphtrain.compile.html import html_table
from graphtrain.errors import TrainingError
from graphtrain.run.metrics import has_scores, read_journal

if TYPE_CHECKING:
    import pandas

_SHOWN = ("step", "loss", "grad_norm", "learning_rate", "tokens_per_second")
_ROWS = 10  # in a notebook


@dataclass(frozen=True, eq=False)
class Metrics:
    """Metrics of a run, one array for each name, as metrics.jsonl has them.

    The arrays of `training` have one value for each step, those of `validation` one for each
    evaluation, those of `tasks` one for each evaluation on tasks. What was not measured is NaN.
    """

    training: Mapping[str, np.ndarray]
    validation: Mapping[str, np.ndarray]
    tasks: Mapping[str, np.ndarray]

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

        tables = [pandas.DataFrame(dict(one)) for one in self._tables()]
        together = tables[0].merge(tables[1], on="step", how="outer")
        return together.merge(tables[2], on="step", how="outer").set_index("step")

    def _tables(self) -> tuple[Mapping[str, np.ndarray], ...]:
        return self.training, self.validation, self.tasks

    def _repr_html_(self) -> str:
        names = [name for name in _SHOWN if name in self.training]
        rows = zip(*(self.training[name][-_ROWS:] for name in names), strict=True)
        tables = [html_table(names, _as_text(rows))]
        for table in (self.validation, self.tasks):
            if table is self.validation or len(table["step"]):
                rows = zip(*table.values(), strict=True)
                tables.append(html_table(tuple(table), _as_text(rows)))
        evaluations = len(self.validation["step"])
        return f"<p>{len(self.step)} steps, {evaluations} evaluations</p>" + "".join(tables)


def read_metrics(directory: Path) -> Metrics:
    """Read the metrics of a run.

    Raises:
        TrainingError: the run has no metrics.
    """
    records = read_journal(directory)
    if not records:
        raise TrainingError(f"{directory} has no metrics.jsonl with records: no step was taken")
    evaluations = [record for record in records if "validation_loss" in record]
    steps = [record for record in records if "loss" in record]
    scores = [record for record in records if has_scores(record)]
    return Metrics(
        _columns(steps, ("step", "loss")),
        _columns(evaluations, _OF_EVALUATIONS),
        _columns(scores, ("step",)),
    )


_OF_EVALUATIONS = ("step", "validation_loss")


def _as_text(rows: Iterable[Sequence[float]]) -> Iterator[list[str]]:
    return ([f"{value:.6g}" for value in row] for row in rows)


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
