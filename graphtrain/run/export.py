"""Export of a run that is complete (`run.export`): a Hugging Face folder, by a process beside it.

The folder is hf-STEP in the directory of the run. It appears when it is complete, so a start of a
run that is complete exports what an interrupted one did not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from signal import Signals
from typing import Any

from graphtrain.config.schema import Run
from graphtrain.errors import TrainingError
from graphtrain.run.agreement import on_rank_zero
from graphtrain.run.events import RunSummary
from graphtrain.run.export_process import MODULE, ExportJob, export_directory
from graphtrain.run.stalls import EXPORTING
from graphtrain.run.watchdog import Watchdog
from lowering.xla import distributed

_POLL_SECONDS = 0.2


class _Interrupted(Exception):
    """The run was asked to stop while it exported."""


def finish_export(
    run: Run,
    summary: RunSummary,
    watchdog: Watchdog,
    note: Callable[[str], None],
    asked_to_stop: Callable[[], Signals | None] = lambda: None,
) -> RunSummary:
    """Export the last checkpoint of a run that is complete; return its summary with the folder.

    Called on every rank; a process of rank 0 exports.

    Args:
        run: Settings of the run.
        summary: Outcome of the run.
        watchdog: Watchdog of this process.
        note: Called with lines for the log of the run.
        asked_to_stop: Returns the signal by which this process is asked to stop, or None. With
            several processes, an export is not given up.

    Raises:
        TrainingError: the folder cannot be written. The run and its checkpoints are complete.
    """
    if run.export is None or summary.stopped_by is not None:
        return summary
    directory, step = Path(run.directory), summary.steps

    def wait() -> None:
        watchdog.move(EXPORTING, step)

    def is_interrupted() -> bool:
        wait()
        return distributed.count() == 1 and asked_to_stop() is not None

    try:
        on_rank_zero(lambda: _export(run, step, is_interrupted, note), wait)
    except _Interrupted:
        signal = asked_to_stop()
        assert signal is not None
        return replace(summary, stopped_by=signal.name)
    return replace(summary, exported=export_directory(directory, step))


def _export(
    run: Run, step: int, is_interrupted: Callable[[], bool], note: Callable[[str], None]
) -> None:
    """Have a process export; end it when the run is to stop.

    Raises:
        TrainingError: it failed.
        _Interrupted: the run is to stop.
    """
    job = ExportJob(run.directory, step, run.upload_place or run.checkpoint_place)
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", MODULE, job.encode()],
            stdin=subprocess.PIPE,  # whose end tells it that the run was killed
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},  # the accelerators are those of the run
        )
    except OSError as error:
        raise _failure(run, step, f"no process starts: {error}") from error
    assert process.stdout is not None
    try:
        while process.poll() is None:
            if is_interrupted():
                raise _Interrupted
            time.sleep(_POLL_SECONDS)
        lines = process.stdout.readlines()
    finally:
        process.kill()
        process.communicate()
    for line in lines:
        with suppress(ValueError):  # a library printed something
            _report(run, step, json.loads(line), note)
    if process.returncode:
        raise _failure(run, step, f"its process ended with status {process.returncode}")


def _report(run: Run, step: int, event: dict[str, Any], note: Callable[[str], None]) -> None:
    if "error" in event:
        raise _failure(run, step, event["error"])
    if "warning" in event:
        warnings.warn(event["warning"], stacklevel=1)
    else:
        note(event["note"])


def _failure(run: Run, step: int, reason: str) -> TrainingError:
    return TrainingError(
        f"the run is complete, and its checkpoint of step {step} is saved, but run.export failed: "
        f"{reason}; correct it and start the run again, which then only exports"
    )
