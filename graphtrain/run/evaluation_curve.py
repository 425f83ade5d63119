"""Results of evaluations by step: a table, a chart for a terminal, and a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from graphtrain.compile.html import html_table
from graphtrain.run.loss_curve import line_chart


@dataclass(frozen=True)
class EvaluationCurve:
    """Metrics of checkpoints of one run."""

    values: Mapping[str, Mapping[int, float]]  # of each metric by step, such as "boolq/acc"
    errors: Mapping[str, Mapping[int, float]] = field(default_factory=dict)  # standard errors
    members: frozenset[str] = frozenset()  # tasks that a group contains; they are in no picture

    @cached_property
    def steps(self) -> list[int]:
        return sorted({step for values in self.values.values() for step in values})

    def table(self) -> str:
        """Return one line for each step, and one column for each metric."""
        rows = [("step", *self.values), *self._rows()]
        widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
        lines = (
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in rows
        )
        return "\n".join(lines)

    def chart(self) -> str:
        """Return the metrics by step as a text chart."""
        return line_chart({name: sorted(self.values[name].items()) for name in self._shown()})

    def json(self) -> str:
        """Return metrics and standard errors of each step as JSON."""
        rows = []
        for step in self.steps:
            row: dict[str, Any] = {"step": step, "metrics": _at(self.values, step)}
            if errors := _at(self.errors, step):
                row["standard_errors"] = errors
            rows.append(row)
        return json.dumps(rows, indent=2)

    def picture(self, kind: str) -> bytes:
        """Return a picture of the metrics by step; the bars are standard errors.

        Args:
            kind: "svg" or "png".

        Raises:
            MissingExtra: vl-convert is not installed.
        """
        from lowering.machine.extras import optional_import

        with optional_import("a picture of evaluations"):
            import vl_convert
        if kind == "svg":
            return vl_convert.vegalite_to_svg(self._vega_lite()).encode()
        return vl_convert.vegalite_to_png(self._vega_lite(), scale=2)

    def _repr_html_(self) -> str:
        return html_table(("step", *self.values), self._rows())

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (str(step), *(_text(values.get(step)) for values in self.values.values()))
            for step in self.steps
        ]

    def _shown(self) -> list[str]:
        return [name for name in self.values if name.partition("/")[0] not in self.members]

    def _vega_lite(self) -> dict[str, Any]:
        """Return the picture as Vega-Lite: a panel for each metric, with a scale of its own."""
        rows = [
            {"step": step, "metric": name, "value": value, "error": error}
            for name in self._shown()
            for step, value in self.values[name].items()
            for error in [self.errors.get(name, {}).get(step, 0.0)]
        ]
        x = {"field": "step", "type": "quantitative"}
        y = {"field": "value", "type": "quantitative", "scale": {"zero": False}, "title": None}
        return {
            "data": {"values": rows},
            "facet": {"field": "metric", "type": "nominal", "columns": 2, "title": None},
            "columns": 2,
            "resolve": {"scale": {"y": "independent"}},
            "spec": {
                "width": 320,
                "height": 200,
                "layer": [
                    {"mark": {"type": "line", "point": True}, "encoding": {"x": x, "y": y}},
                    {
                        "transform": [{"filter": "datum.error > 0"}],
                        "mark": "errorbar",
                        "encoding": {"x": x, "y": y, "yError": {"field": "error"}},
                    },
                ],
            },
        }


def _at(series: Mapping[str, Mapping[int, float]], step: int) -> dict[str, float]:
    return {name: values[step] for name, values in series.items() if step in values}


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
