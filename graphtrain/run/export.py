"""Export of a run that is complete (`run.export`): a folder, by a process beside it.

The folder is hf-STEP or peft-STEP in the directory of the run. It appears when it is complete, so a
start of a run that is complete exports what an interrupted one did not.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from concurrent import futures
from dataclasses import replace
from pathlib import Path
from signal import Signals
from typing import Any

from graphtrain.checkpoints.side_process import read_events, start_process
from graphtrain.checkpoints.steps import best_step
from graphtrain.config.schema import Run
from graphtrain.errors import TrainingError
from graphtrain.run.agreement import on_all_ranks, on_rank_zero
from graphtrain.run.events import RunSummary
from graphtrain.run.export_process import MODULE, ExportJob
from graphtrain.run.exported_checkpoint import best_stored_step
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
    *,
    is_shared: bool = True,
) -> RunSummary:
    """Export a checkpoint of a run that is complete; return its summary with the folder.

    Called on every rank; a process of rank 0 exports.

    Args:
        run: Settings of the run.
        summary: Outcome of the run.
        watchdog: Watchdog of this process.
        note: Called with lines for the log of the run.
        asked_to_stop: Returns the signal by which this process is asked to stop, or None. With
            several processes, an export is not given up.
        is_shared: Whether all hosts see the same directory of the run. Otherwise its checkpoints
            are in its store.

    Raises:
        TrainingError: the folder cannot be written. The run and its checkpoints are complete.
    """
    if run.export is None or summary.stopped_by is not None:
        return summary

    def wait() -> None:
        watchdog.move(EXPORTING, summary.steps)

    step = summary.steps
    if run.export_weights == "best":
        step = _best_step(run, summary.best_step, wait, is_shared=is_shared)
    store = run.checkpoint_place
    place, is_average = run.upload_place or store, run.export_weights == "averaged"
    job = ExportJob(run.directory, step, place, run.export, is_average, store)

    def is_interrupted() -> bool:
        wait()
        return distributed.count() == 1 and asked_to_stop() is not None

    try:
        on_rank_zero(lambda: _export(job, is_interrupted, note), wait)
    except _Interrupted:
        signal = asked_to_stop()
        assert signal is not None
        return replace(summary, stopped_by=signal.name)
    return replace(summary, exported=job.folder)


def _best_step(run: Run, best: int | None, wait: Callable[[], None], *, is_shared: bool) -> int:
    """Return the step with the lowest validation loss, of the checkpoints that there are.

    Called on every rank.

    Args:
        run: Settings of the run.
        best: Step with the lowest loss of all that were evaluated.
        wait: Called now and then.
        is_shared: As of `finish_export`.

    Raises:
        TrainingError: no checkpoint was saved with one, or the store cannot be read.
    """
    store = run.checkpoint_place
    if is_shared or store is None:
        return on_all_ranks(lambda: best_step(Path(run.directory) / "checkpoints"))
    found: list[int] = []
    on_rank_zero(lambda: found.append(best_stored_step(store)), wait)
    step = int(distributed.all_gather_text(str(*found))[0])
    if step != best and found:
        warnings.warn(
            f"step {best} has the lowest validation loss, but is not in {store[0]}, where hosts "
            f"that share no disk have their checkpoints; step {step} is exported",
            stacklevel=1,
        )
    return step


def _export(
    job: ExportJob, is_interrupted: Callable[[], bool], note: Callable[[str], None]
) -> None:
    """Have a process export; end it when the run is to stop.

    Raises:
        TrainingError: it failed.
        _Interrupted: the run is to stop.
    """
    try:
        # The accelerators are those of the run.
        process = start_process(MODULE, job, {"JAX_PLATFORMS": "cpu"})
    except OSError as error:
        raise _failure(job.step, f"no process starts: {error}") from error
    assert process.stdout is not None
    with futures.ThreadPoolExecutor(1) as pool:
        # Read at once: the process would wait for ever at a pipe that is full.
        lines = pool.submit(process.stdout.readlines)
        try:
            while process.poll() is None:
                if is_interrupted():
                    raise _Interrupted
                time.sleep(_POLL_SECONDS)
        finally:
            process.kill()
            futures.wait([lines])
            process.communicate()
    for event in read_events(lines.result()):
        _report(job.step, event, note)
    if process.returncode:
        raise _failure(job.step, f"its process ended with status {process.returncode}")


def _report(step: int, event: dict[str, Any], note: Callable[[str], None]) -> None:
    if "error" in event:
        raise _failure(step, event["error"])
    if "warning" in event:
        warnings.warn(event["warning"], stacklevel=1)
    else:
        note(event["note"])


def _failure(step: int, reason: str) -> TrainingError:
    return TrainingError(
        f"the run is complete, and its checkpoint of step {step} is saved, but run.export failed: "
        f"{reason}; correct it and start the run again, which then only exports"
    )
