"""Report of `graphtrain extract` on the graphs of a script."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from graphtrain.cache.sizes import format_size
from graphtrain.compile import extracted_graphs
from graphtrain.compile.tasks import CompilationReport
from graphtrain.torch_xla.graphs import Extraction

_COLUMNS = ("graph", "steps", "instructions", "size", "parameters", "outcome", "seconds")


def as_dictionary(
    extraction: Extraction, target: str | None, result: CompilationReport | None
) -> dict[str, Any]:
    """Return the extraction as JSON, with the outcome of each graph if they were compiled."""
    extracted = extracted_graphs.extracted_graphs(extraction, target)
    outcomes: dict[str, Any] = {} if result is None else result.as_json()
    by_label = {row["label"]: row for row in outcomes.pop("graphs", ())}
    return {
        "script": extraction.script,
        "versions": dict(extraction.versions),
        "devices": extraction.devices,
        "steps": extraction.steps,
        "warnings": list(extraction.warnings),
        "stopped": extraction.error or None,
        **outcomes,
        "graphs": [
            extracted_graphs.graph_facts(graph, extracted[graph.hash])
            | by_label.get(extracted[graph.hash].name, {})
            for graph in extraction.graphs
        ],
    }


def table(extraction: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a table of the graphs."""
    rows = [_COLUMNS, *(_row(graph) for graph in extraction["graphs"])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()


def _row(graph: dict[str, Any]) -> tuple[str, ...]:
    return (
        graph["hash"],
        ranges(graph["steps"]),
        f"{graph['instructions']:,}",
        format_size(graph["bytes"]),
        str(graph["parameters"]),
        graph.get("status", "extracted"),
        f"{graph['seconds']:.1f}" if "seconds" in graph else "",
    )


def ranges(numbers: Sequence[int]) -> str:
    """Format numbers as ranges, for example "0, 2-5"."""
    chosen = sorted(set(numbers))
    begins = [chosen[0], *(b for a, b in pairwise(chosen) if b != a + 1)]
    ends = [*(a for a, b in pairwise(chosen) if b != a + 1), chosen[-1]]
    return ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in zip(begins, ends, strict=True))
