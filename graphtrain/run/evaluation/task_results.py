"""Results of an evaluation: lm-eval's own document, with where they come from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any


@dataclass(frozen=True)
class TaskResults:
    """Results of tasks, and the answers that they follow from."""

    document: Mapping[str, Any]  # as lm-eval writes it, and "graphtrain": the provenance
    samples: Mapping[str, Sequence[Mapping[str, Any]]]  # answers, by task

    def table(self) -> str:
        """Return the results as lm-eval prints them."""
        from lm_eval.utils import make_table

        tables = [make_table(dict(self.document))]
        if self.document.get("groups"):
            tables.append(make_table(dict(self.document), "groups"))
        return "\n".join(tables)

    def scores(self) -> dict[str, float]:
        """Return the metrics of tasks and groups by name, for example "boolq/acc"."""
        return metric_values(self.document["results"])

    def json(self) -> str:
        """Return the document as JSON."""
        return json.dumps(self.document, default=_as_json, ensure_ascii=False, indent=2)

    @classmethod
    def without_samples(cls, document: str) -> TaskResults:
        """Return the results in a document of JSON, which has no samples."""
        return cls(json.loads(document), {})

    def sample_lines(self) -> str:
        """Return one line of JSON for each answer, with its task."""
        lines = (
            json.dumps({"task": task, **sample}, default=_as_json, ensure_ascii=False)
            for task, samples in self.samples.items()
            for sample in samples
        )
        return "".join(f"{line}\n" for line in lines)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.table())}</pre>"


def metric_values(
    results: Mapping[str, Mapping[str, Any]], *, errors: bool = False
) -> dict[str, float]:
    """Return the metrics of lm-eval's results by the names that its own loggers give them.

    These are "boolq/acc" where a task has no filter, else "gsm8k/exact_match,strict-match".

    Args:
        results: Results by task and group.
        errors: Return the standard errors, by the name of the metric they belong to.
    """
    values = {}
    for task, metrics in results.items():
        for key, value in metrics.items():
            metric, comma, filter_name = key.partition(",")
            is_error = metric.endswith("_stderr")
            if not comma or is_error != errors or not isinstance(value, int | float):
                continue
            suffix = "" if filter_name == "none" else f",{filter_name}"
            values[f"{task}/{metric.removesuffix('_stderr')}{suffix}"] = float(value)
    return values


def _as_json(value: Any) -> Any:
    """Return a value of NumPy, or a function in the settings of a task, as JSON."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return sorted(value) if isinstance(value, set | frozenset) else str(value)
