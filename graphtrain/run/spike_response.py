"""Response of a run to a step that is a spike: it stops, skips the step, or rewinds."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphtrain.checkpoints.checkpoint import Checkpoints
from graphtrain.config.schema import Run
from graphtrain.errors import TrainingError
from graphtrain.run.metrics import good_steps, read_journal
from graphtrain.run.pending_step import PendingStep, if_finite
from graphtrain.run.spikes import NAME as SPIKES_NAME
from graphtrain.run.spikes import RewindRun, SpikeRecord, SpikeWindow, write_spike
from lowering.xla import distributed


def last_good_checkpoint(directory: Path, checkpoints: Checkpoints) -> str:
    """Return the newest checkpoint from which a step had a finite loss, or "none".

    Args:
        directory: Directory of the run.
        checkpoints: Its checkpoints.
    """
    known = good_steps(read_journal(directory))
    good = [step for step in checkpoints.steps() if step in known]
    return str(checkpoints.path(good[-1])) if good else "none"


@dataclass(frozen=True)
class SpikeResponse:
    """Response to spikes by run.spikes.on_spike."""

    run: Run
    checkpoints: Checkpoints
    window: SpikeWindow
    start: int  # step from which this start of the run begins
    rewinds: int  # to that step

    @property
    def directory(self) -> Path:
        return Path(self.run.directory)

    def respond(self, spike: PendingStep, loader: Any) -> None:
        """Record a spike; return if its step was left undone, so that the run goes on.

        Args:
            spike: The step.
            loader: The data loader, which knows the documents of its batch.

        Raises:
            TrainingError: it stops the run.
            RewindRun: the run returns to a checkpoint.
        """
        on_spike = self.run.spikes.on_spike
        stops, checkpoint, data = on_spike == "stop", None, None
        if on_spike == "rewind":
            self.checkpoints.wait()  # until the last checkpoint is complete
            checkpoint = self.checkpoints.newest()
            data = loader.state_after(spike.number, at=checkpoint)
            rewinds = self.rewinds if checkpoint == self.start else 0
            stops = rewinds >= self.run.spikes.max_consecutive
        elif on_spike == "skip":
            stops = self.window.skip()
        documents: dict[str, list[int]] = {}
        if distributed.rank() == 0:
            found = loader.documents(spike.number - 1)
            documents = {prefix: array.tolist() for prefix, array in found.items()}
        record = SpikeRecord(
            step=spike.number,
            on_spike="stop" if stops else on_spike,
            loss=if_finite(spike.loss),
            grad_norm=if_finite(spike.grad_norm),
            loss_limit=if_finite(spike.limits.loss),
            grad_norm_limit=if_finite(spike.limits.grad_norm),
            documents=documents,
            checkpoint=None if stops else checkpoint,
            data=None if stops else data,
        )
        if distributed.rank() == 0:
            write_spike(self.directory, record)
        if stops:
            raise TrainingError(self._reason(spike, loader))
        if checkpoint is not None:
            raise RewindRun(record)
        if distributed.rank() == 0:
            self._warn_of_skipped(spike)

    def _warn_of_skipped(self, spike: PendingStep) -> None:
        warnings.warn(
            f"step {spike.number} was skipped: loss {spike.loss:.6g}, gradient norm "
            f"{spike.grad_norm:.6g}, limits: {spike.limits.describe()}; its documents are in "
            f"{self.directory / SPIKES_NAME}",
            stacklevel=1,
        )

    def _reason(self, spike: PendingStep, loader: Any) -> str:
        """Say which step is a spike, of which documents, and what can be done."""
        self.checkpoints.wait()  # until the last checkpoint is complete
        saved, good = (
            self.checkpoints.steps(),
            last_good_checkpoint(self.directory, self.checkpoints),
        )
        is_finite = math.isfinite(spike.loss) and math.isfinite(spike.grad_norm)
        above = f", above run.spikes ({spike.limits.describe()})" if is_finite else ""
        text = (
            f"step {spike.number}: loss {spike.loss}, gradient norm {spike.grad_norm}{above}; the "
            f"batch contains {loader.describe(spike.number - 1)}; last good checkpoint: {good}"
        )
        if saved and good != (newest := str(self.checkpoints.path(saved[-1]))):
            text += (
                f"; {newest} is newer, but no step from it was finite: "
                "move it away to resume from the one before it"
            )
        return text + self._remedy()

    def _remedy(self) -> str:
        """Say what can be done, or that what was tried did not help."""
        settings = self.run.spikes
        if settings.on_spike != "stop":
            most = settings.max_consecutive
            what = "skipped step" if settings.on_spike == "skip" else "rewind"
            several = "" if most == 1 else "s in a row"
            return f"; {most} {what}{several} did not help (run.spikes.max_consecutive)"
        return (
            "; the same command meets the same batch again: lower run.learning_rate.peak or "
            "program.optimizer.clip_norm (and permit it with --allow-change NAME), take these "
            'documents out of the data, or leave them out with run.spikes.on_spike = "rewind"'
        )
