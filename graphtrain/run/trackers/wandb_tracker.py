"""Weights & Biases. Its own variables choose the project, the entity and offline mode."""

# pyright: reportMissingImports=false

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from typing import Any

from graphtrain.errors import TrainingError
from graphtrain.run.events import RunStart
from graphtrain.run.trackers.settings import named_settings
from graphtrain.run.trackers.thread import FOLDER, StepMetrics
from lowering.machine.extras import optional_import


class WandbTracker:
    """One run in a project, resumed by every start."""

    _run: Any

    def start(self, start: RunStart, identifier: str | None) -> str:
        with optional_import("run.trackers"):
            import wandb
        # Otherwise it would ask for a key on the terminal of the run.
        if wandb.setup().settings.mode == "online" and not wandb.api.api_key:
            raise TrainingError("not logged in; run wandb login, or set WANDB_MODE=offline")
        identifier = identifier or uuid.uuid4().hex[:12]
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "graphtrain"),
            id=identifier,
            name=os.environ.get("WANDB_NAME", start.directory.absolute().name),
            resume="allow",
            dir=start.directory / FOLDER,
            config=named_settings(start.config),
            settings=wandb.Settings(console="off", silent=True),
        )
        # Its own count of steps must not go back, as that of a restarted run does.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        return identifier

    def log(self, records: Sequence[StepMetrics]) -> None:
        for step, metrics in records:
            self._run.log({"step": step, **metrics})

    def end(self, completed: bool) -> None:
        self._run.finish(exit_code=0 if completed else 1)


make_tracker = WandbTracker
