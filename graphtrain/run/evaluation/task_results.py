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

    def json(self) -> str:
        """Return the document as JSON."""
        return json.dumps(self.document, default=_as_json, ensure_ascii=False, indent=2)

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


def _as_json(value: Any) -> Any:
    """Return a value of NumPy, or a function in the settings of a task, as JSON."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return sorted(value) if isinstance(value, set | frozenset) else str(value)
