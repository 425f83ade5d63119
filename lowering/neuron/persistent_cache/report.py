"""Status lines and reports on a cache and its compilation, in the format of AWS's tools.

Source: AWS Neuron documentation, neuron_parallel_compile and persistent cache, SDK 2.32.
"""

import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lowering.neuron.persistent_cache.compilation import EntryOutcome
from lowering.neuron.persistent_cache.entries import NeuronCacheEntry
from lowering.neuron.persistent_cache.finishing import FinishReport

# Users' Slurm scripts set it to get the report as files in the working directory.
DUMP_VARIABLE = "NEURON_PARALLEL_COMPILE_DUMP_RESULTS"


def status_line(entries: Sequence[NeuronCacheEntry]) -> str:
    """Return AWS's status line of a cache; stale locks count as remaining items."""
    states = Counter(entry.state for entry in entries)
    locked, failed, done = states["locked"], states["failed"], states["done"]
    remaining = len(entries) - locked - failed - done
    return _line(
        "NEURON_CACHE",
        f"Current remaining items are {remaining}, locked are {locked}, failed are {failed}, "
        f"done are {done}, total is {len(entries)}",
    )


def summary_lines(outcomes: Sequence[EntryOutcome]) -> list[str]:
    """Return the last lines that AWS's tool prints after a compilation."""
    counts = Counter(outcome.status for outcome in _attempted(outcomes))
    return [
        _line("NEURON_PARALLEL_COMPILE", text)
        for text in (
            f"Total graphs: {counts.total()}",
            f"Total successful compilations: {counts['compiled']}",
            f"Total failed compilations: {counts['failed']}",
        )
    ]


def as_json(finished: FinishReport) -> dict[str, Any]:
    """Return the report of a compilation; failures have kind and message besides AWS's fields."""
    attempted = _attempted(finished.outcomes)
    summary = Counter(str(outcome.status == "compiled").lower() for outcome in attempted)
    return {
        "compilation_summary": dict(sorted(summary.items(), reverse=True)),
        "compilation_report": {str(outcome.program): _graph(outcome) for outcome in attempted},
        "start_time": finished.start_time,
        "compilation_time": round(finished.seconds, 3),
    }


def dump(report: dict[str, Any], directory: Path) -> list[Path]:
    """Write the two files that AWS's tool writes if DUMP_VARIABLE is set, with equal content."""
    timestamp = time.strftime("%Y%m%d%H%M%S", time.localtime(report["start_time"]))
    name = f"neuron_parallel_compile_results_{timestamp}.json"
    paths = [directory / name, directory / f"total_{name}"]
    for path in paths:
        path.write_text(json.dumps(report, indent=4) + "\n")
    return paths


def _attempted(outcomes: Sequence[EntryOutcome]) -> list[EntryOutcome]:
    return [outcome for outcome in outcomes if outcome.status != "locked"]


def _graph(outcome: EntryOutcome) -> dict[str, Any]:
    graph_report: dict[str, Any] = {
        "status": outcome.status == "compiled",
        "retry": max(0, outcome.attempts - 1),
        "compile_time": round(outcome.seconds, 3),
    }
    if outcome.failure is not None:
        graph_report |= {"failure": outcome.failure.kind, "error": outcome.failure.message}
    return graph_report


def _line(tool: str, text: str) -> str:
    now = time.time()
    timestamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
    return f"{timestamp}.{int(now % 1 * 1000):06d}:  {os.getpid()}  INFO ||{tool}||: {text}"
