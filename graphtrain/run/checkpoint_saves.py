"""Checkpoints that a run saves after its steps, and their reports to callbacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lowering
from graphtrain.checkpoints.checkpoint import Checkpoints
from graphtrain.config.schema import Run, is_imported
from graphtrain.run.callbacks import Notify
from graphtrain.run.finite_weights import check_finite_weights
from graphtrain.run.metrics import JournalPosition
from graphtrain.run.phases import PhaseSequence
from graphtrain.run.spike_response import last_good_checkpoint
from graphtrain.run.spikes import SpikeWindow
from graphtrain.run.verification import compare_replicas
from lowering.trees import Tree


@dataclass
class CheckpointSaves:
    """Saving of the state of a run; the files are written while the next steps compute."""

    run: Run
    phases: PhaseSequence
    checkpoints: Checkpoints
    spikes: SpikeWindow
    changes: Sequence[dict[str, Any]]  # permitted changes, which every checkpoint records
    notify: Notify  # of callbacks
    _saving: int | None = None  # step of the checkpoint that is being written

    def save(
        self,
        completed_steps: int,
        state: Tree,
        *,
        validation_loss: float | None,
        journal: JournalPosition,
        is_whole: bool,
        is_last: bool,
    ) -> None:
        """Begin to save the state, when the checkpoint before it is complete.

        Args:
            completed_steps: Number of completed steps.
            state: State after them.
            validation_loss: Validation loss after this step; None if there is none.
            journal: Returns the position of the journal of metrics.
            is_whole: Whether it is saved in the directory of the run, not on disks of hosts alone.
            is_last: Whether no further step uses the weights, so that they are checked here.

        Raises:
            TrainingError: weights are not finite, or the checkpoint before could not be written.
        """
        program = self.phases.current.phase.program
        if self.run.verify_every is not None:
            compare_replicas(self.phases.current.programs, state, completed_steps)
        self.checkpoints.wait()
        self.report()  # before the next step is noted, on all ranks alike
        arrays = lowering.backend(program.target).checkpoint_arrays(state)
        if is_last:
            check_finite_weights(
                arrays["parameters"],
                completed_steps,
                partial(last_good_checkpoint, Path(self.run.directory), self.checkpoints),
                has_constants=is_imported(program.model),
            )
        self.checkpoints.save(
            completed_steps,
            arrays,
            self.phases.loader.state(),
            validation_loss=validation_loss,
            is_whole=is_whole,
            journal=journal(),
            identity=self.phases.current.identity,
            changes=self.changes,
            spikes=self.spikes.state(),
        )
        self._saving = completed_steps if is_whole else None

    def report(self) -> None:
        """Notify the callbacks of the checkpoint that was being written and is now complete."""
        if self._saving is not None:
            self.notify("on_checkpoint", self._saving, self.checkpoints.path(self._saving))
            self._saving = None

    def report_if_written(self) -> None:
        """Raise if a checkpoint could not be written; report one that is complete.

        Raises:
            TrainingError: it could not be written.
        """
        self.checkpoints.raise_if_failed()
        if not self.checkpoints.is_writing():
            self.report()

    def finish(self) -> None:
        """Wait until the last checkpoint is complete, and report it."""
        self.checkpoints.wait()
        self.report()
