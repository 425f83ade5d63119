"""Prometheus: the last metrics as a file for the textfile collector of its node exporter."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from graphtrain.run.events import RunStart
from graphtrain.run.trackers.thread import FOLDER, StepMetrics
from lowering.machine.extras import optional_import

NAME = "graphtrain.prom"


class PrometheusTracker:
    """File of gauges graphtrain_NAME, with the directory of the run as their label."""

    _path: Path
    _library: Any

    def __init__(self) -> None:
        self._gauges: dict[str, Any] = {}

    def start(self, start: RunStart, identifier: str | None) -> str:
        with optional_import("run.trackers"):
            import prometheus_client
        self._library, self._registry = prometheus_client, prometheus_client.CollectorRegistry()
        self._path = start.directory / FOLDER / NAME
        self._run = str(start.directory)
        return NAME

    def log(self, records: Sequence[StepMetrics]) -> None:
        for step, metrics in records:
            for name, value in {"step": step, **metrics}.items():
                if value is not None:
                    self._gauge(name).labels(run=self._run).set(value)
        self._library.write_to_textfile(str(self._path), self._registry)

    def end(self, completed: bool) -> None:
        self._gauge("completed").labels(run=self._run).set(completed)
        self._library.write_to_textfile(str(self._path), self._registry)

    def _gauge(self, name: str) -> Any:
        name = "graphtrain_" + re.sub(r"\W", "_", name, flags=re.ASCII)
        if name not in self._gauges:
            gauge = self._library.Gauge(name, "metric of a run", ["run"], registry=self._registry)
            self._gauges[name] = gauge
        return self._gauges[name]


make_tracker = PrometheusTracker
