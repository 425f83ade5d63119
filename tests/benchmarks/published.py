"""Predicted beside published throughput: the judge of the plan's time model.

    python tests/benchmarks/published.py [--json FILE] [--markdown]

Every row of published_steps.toml becomes a program and is estimated without a compiler, as by
`graphtrain plan --no-compile`. What machines reach of their peak (`achieved` in topologies.toml)
is fitted on half of the rows, chosen by a hash of their names; errors are reported for the other
half. Rows that the model or the planner cannot express are listed with the reason, and count as
misses.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "graphs"))
from published_fit import (
    Fits,
    Prediction,
    achieved_of,
    fit,
    held_out_range,
    machines_table,
    predict_all,
)
from published_ranks import Strategies, strategies_by_source
from published_rows import read_rows

from lowering.machine.target import Achieved

TOLERANCE = 0.15  # of the published step time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", action="store_true", help="print the rows as a table")
    arguments = parser.parse_args()
    predictions, reasons = predict_all(read_rows())
    report = Report(predictions, fit(predictions), reasons)
    print("\n".join(report.lines(arguments.markdown)))
    if arguments.json:
        arguments.json.write_text(json.dumps(report.as_json(), indent=2) + "\n")


@dataclass(frozen=True)
class Report:
    """Errors of all predictions with what was fitted."""

    predictions: Sequence[Prediction]
    fitted: Fits
    reasons: Mapping[str, str]

    @cached_property
    def errors(self) -> dict[str, float]:
        """Relative errors by row; negative if predicted too fast."""
        return {one.name: one.error(achieved_of(one, self.fitted)) for one in self.predictions}

    @cached_property
    def held_out(self) -> list[Prediction]:
        """Rows that nothing was fitted to, the worst first."""
        held_out = [one for one in self.predictions if one.is_held_out]
        return sorted(held_out, key=lambda one: -abs(self.errors[one.name]))

    @cached_property
    def strategies(self) -> list[Strategies]:
        """Sources that list several strategies for one model."""
        return strategies_by_source(self.predictions, self.fitted)

    def lines(self, markdown: bool) -> list[str]:
        """Return the report for readers."""
        rows = self._table() if markdown else self._worst_first()
        missing = (f"not predicted: {name}: {why}" for name, why in self.reasons.items())
        return [*self._summary(), *self._ranks(), "", *rows, "", *missing]

    def as_json(self) -> dict[str, Any]:
        """Return the report for programs."""
        fitted = self.fitted.items()
        return {
            "fitted": [{"machine": key[0], "kernel": key[1], **asdict(of)} for key, of in fitted],
            "rows": [
                {
                    "name": one.name,
                    "published": one.published,
                    "predicted": one.published * (1 + self.errors[one.name]),
                    "error": self.errors[one.name],
                    "held_out": one.is_held_out,
                }
                for one in self.predictions
            ],
            "strategies": [
                {"source": one.title, "correlation": one.correlation, "pairs": one.pairs}
                for one in self.strategies
            ],
            "not_predicted": dict(self.reasons),
        }

    def _summary(self) -> list[str]:
        rows = len(self.predictions)
        median = statistics.median(abs(self.errors[one.name]) for one in self.held_out)
        table = machines_table(self.predictions, self.fitted)
        return [
            f"{rows} of {rows + len(self.reasons)} rows can be predicted",
            "fitted, of the peak: products, attention, overlap of tensor parallelism",
            *(f"  {', '.join(key)}: {_fractions(of)}" for key, of in sorted(self.fitted.items())),
            "in topologies.toml belongs",
            *(f"  {machine}: {_fractions(of)}" for machine, of in table.items()),
            f"held out: {self._share(self.held_out)} within {TOLERANCE:.0%}, "
            f"median error {median:.1%}",
            "held out: 80 % took {:.2f} to {:.2f} x as long as predicted".format(
                *held_out_range(self.predictions, self.fitted)
            ),
            *(f"  {machine}: {self._share(rows)}" for machine, rows in self._by_machine()),
        ]

    def _by_machine(self) -> list[tuple[str, list[Prediction]]]:
        machines = sorted({one.machine for one in self.held_out})
        return [
            (machine, [one for one in self.held_out if one.machine == machine])
            for machine in machines
        ]

    def _share(self, rows: Sequence[Prediction]) -> str:
        within = [one for one in rows if abs(self.errors[one.name]) <= TOLERANCE]
        return f"{len(within)} of {len(rows)}"

    def _ranks(self) -> list[str]:
        pairs = [one.pairs for one in self.strategies]
        right, compared = (sum(counts) for counts in zip(*pairs, strict=True))
        return [
            f"strategies of one source for one workload: {right} of {compared} pairs in order",
            *(f"  {_order(one)}: {one.title}" for one in self.strategies),
        ]

    def _worst_first(self) -> list[str]:
        return [
            f"{self.errors[one.name]:+5.0%}  {one.published:8.3f} s  "
            f"{one.published * (1 + self.errors[one.name]):8.3f} s  {one.name}"
            for one in self.held_out
        ]

    def _table(self) -> list[str]:
        rows = sorted(self.predictions, key=lambda one: one.name)
        return [
            "| row | published, s | predicted, s | error | |",
            "|---|---|---|---|---|",
            *(
                f"| {one.name} | {one.published:.3g} | "
                f"{one.published * (1 + self.errors[one.name]):.3g} | "
                f"{self.errors[one.name]:+.0%} | {'held out' if one.is_held_out else 'fitted'} |"
                for one in rows
            ),
        ]


def _order(of: Strategies) -> str:
    """Return in how far the strategies of a source are in order."""
    if of.correlation is not None:
        return f"rank correlation {of.correlation:+.2f} of {len(of.published)}"
    if of.pairs[0]:
        return "in order"
    ratios = (f"{one[1] / one[0]:.3f}" for one in (of.published, of.predicted))
    return "NOT in order, second over first published and predicted: {}, {}".format(*ratios)


def _fractions(of: Achieved) -> str:
    """Return what is reached, in two digits."""
    narrow = f", in 8 bits {of.products_8bit:.2f}" if of.products_8bit else ""
    return f"{of.products:.2f} {of.attention:.2f} {of.tensor_overlap:.1f}{narrow}"


if __name__ == "__main__":
    main()
