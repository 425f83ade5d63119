"""MLflow. MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME choose where it stores the run."""

# pyright: reportMissingImports=false

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from graphtrain.run.events import RunStart
from graphtrain.run.trackers.settings import named_settings
from graphtrain.run.trackers.thread import StepMetrics
from lowering.machine.extras import optional_import

_BATCH = 1000  # metrics that MLflow accepts at once
_PARAMETERS, _PARAMETER_LENGTH = 100, 6000  # the same of parameters, and characters of one


class MlflowTracker:
    """One run in an experiment, resumed by every start."""

    _client: Any
    _metric: Any
    _run: str

    def start(self, start: RunStart, identifier: str | None) -> str:
        with optional_import("run.trackers"):
            from mlflow.entities import Metric, Param
            from mlflow.tracking import MlflowClient
        self._client, self._metric = MlflowClient(), Metric
        if identifier is not None:
            self._run = identifier
            self._client.update_run(identifier, status="RUNNING")
            return identifier
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "graphtrain")
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        made = self._client.create_run(experiment, run_name=start.directory.absolute().name)
        self._run = made.info.run_id
        settings = named_settings(start.config)
        parameters = [Param(key, value[:_PARAMETER_LENGTH]) for key, value in settings.items()]
        for first in range(0, len(parameters), _PARAMETERS):
            self._client.log_batch(self._run, params=parameters[first : first + _PARAMETERS])
        return self._run

    def log(self, records: Sequence[StepMetrics]) -> None:
        now = int(time.time() * 1000)
        metrics = [
            self._metric(name, float(value), now, step)
            for step, values in records
            for name, value in values.items()
            if value is not None
        ]
        for first in range(0, len(metrics), _BATCH):
            self._client.log_batch(self._run, metrics=metrics[first : first + _BATCH])

    def end(self, completed: bool) -> None:
        self._client.set_terminated(self._run, "FINISHED" if completed else "KILLED")


make_tracker = MlflowTracker
