"""Steps of a run: train, evaluate, save, and report what happened."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from graphtrain.checkpoints.checkpoint import Checkpoints
from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema import Run
from graphtrain.run.callbacks import Notify
from graphtrain.run.checkpoint_saves import CheckpointSaves
from graphtrain.run.data_check import DataCheck
from graphtrain.run.events import RunSummary
from graphtrain.run.goodput.activities import ACTIVITY_OF_STAGE, STOP
from graphtrain.run.goodput.timeline import Timeline
from graphtrain.run.learning_rate import learning_rate
from graphtrain.run.metrics import JournalPosition, Report
from graphtrain.run.pending_step import PendingStep, if_finite
from graphtrain.run.periodic_evaluations import (
    Move,
    PeriodicEvaluations,
    are_scores_due,
    is_evaluation_due,
)
from graphtrain.run.phases import PhaseSequence
from graphtrain.run.profiles.capture import Profiler
from graphtrain.run.programs import LoadedPrograms
from graphtrain.run.signals import StopRequest
from graphtrain.run.spike_response import SpikeResponse
from graphtrain.run.spikes import SpikeWindow
from graphtrain.run.stalls import COMPUTING, DATA, LOADING, SAVING
from graphtrain.run.step_collectives import first_collective, largest_collective
from graphtrain.run.step_metrics import StepMetrics
from graphtrain.run.validation_history import ValidationHistory
from graphtrain.run.verification import verified_step
from graphtrain.run.watchdog import Watchdog
from lowering.machine.memory_pages import use_huge_pages
from lowering.trees import Tree
from lowering.xla import distributed

if TYPE_CHECKING:
    from graphtrain.run.training_samples import TrainingSamples
    from graphtrain.run.training_tasks import TrainingTasks


@dataclass
class TrainingLoop:
    """Training loop without its state; reads the metrics of a step while the next one computes."""

    run: Run
    phases: PhaseSequence
    frozen: tuple[Tree, ...]  # one tree of weights without gradients, or empty
    checkpoints: Checkpoints
    open_journal: Callable[[], tuple[Report, JournalPosition]]
    notify: Notify  # of callbacks
    start: int
    data_check: DataCheck
    changes: list[dict[str, Any]]  # permitted changes, which every checkpoint records
    stop: StopRequest
    watchdog: Watchdog
    timeline: Timeline
    history: ValidationHistory
    samples: TrainingSamples | None
    tasks: TrainingTasks | None
    spikes: SpikeWindow
    profiler: Profiler
    rewinds: int  # to the step from which it begins
    _write: Report = field(init=False)
    _journal_position: JournalPosition = field(init=False)
    _is_journal_open: bool = False
    _move: Move = field(init=False)
    _evaluations: PeriodicEvaluations = field(init=False)
    _metrics: StepMetrics = field(init=False)
    _saves: CheckpointSaves = field(init=False)
    _validation_loss: float | None = None  # of the last evaluation

    def __post_init__(self) -> None:
        run, phases, checkpoints = self.run, self.phases, self.checkpoints
        check = checkpoints.raise_if_failed
        # Not a method: the loop must be freed by its reference count, with its weights, before a
        # rewound run loads them again.
        self._move = partial(_move, self.watchdog, self.timeline)
        self._evaluations = PeriodicEvaluations(
            run, phases, self.frozen, self.samples, self.tasks, self.stop, self._move, check
        )
        response = SpikeResponse(run, checkpoints, self.spikes, self.start, self.rewinds)
        self._metrics = StepMetrics(phases, self.timeline, response)
        self._saves = CheckpointSaves(
            run, phases, checkpoints, self.spikes, self.changes, self.notify
        )
        self._name_collectives()

    @property
    def program(self) -> ResolvedProgram:
        return self.phases.current.phase.program

    @property
    def programs(self) -> LoadedPrograms:
        return self.phases.current.programs

    def _name_collectives(self) -> None:
        """Let the watchdog name the collectives of the current phase, for which a rank may wait."""
        record = self.programs["train"].record
        self.watchdog.largest_collective = largest_collective(record)
        self.watchdog.first_collective = first_collective(record, distributed.count())

    def _begin_next_phase(self, index: int) -> None:
        """Go on with the program and the batches of the next phase; the state stays as it is."""
        self._finish_pending_step()
        self._move(LOADING, index + 1)
        self.phases.advance()
        self._name_collectives()
        self._metrics.prepare_phase()
        self._metrics.restart_clock()

    def run_steps(
        self, state: Tree, *, evaluate_first: bool = False, score_first: bool = False
    ) -> RunSummary:
        """Run the steps from the first to run.steps, with evaluations and checkpoints.

        Args:
            state: state before the first step.
            evaluate_first: whether the evaluation before the first step was given up by the run
                that saved the checkpoint, and is repeated.
            score_first: the same of the evaluation of tasks.
        """
        if self.stop.should_stop():  # while the run was loading; there is nothing new to save
            return self._summary(self.start)
        if evaluate_first or score_first:
            self._open_journal()
        if evaluate_first:
            self._evaluate(self.start, state)
            self._sample(self.start, state)
        if score_first:
            self._score_tasks(self.start, state)
        completed_steps = self.start
        # A signal in the first evaluation; one that comes later is seen where the step is saved.
        is_stopping = self.stop.signal is not None or self._has_stalled()
        while completed_steps < self.run.steps and not is_stopping:
            state = self._train_step(state, completed_steps)
            completed_steps += 1
            is_stopping = self._evaluate_and_save(state, completed_steps)
        return self._end(state, completed_steps)

    def _open_journal(self) -> None:
        self._write, self._journal_position = self.open_journal()
        self._is_journal_open = True

    def _train_step(self, state: Tree, index: int) -> Tree:
        """Start a step, and finish the one before it while it computes; return the new state."""
        run = self.run
        if self.phases.is_over(index):
            self._end_profile(index, state)
            self._begin_next_phase(index)
        if self.profiler.is_due(index + 1):
            self._finish_pending_step()
            self.profiler.move(index + 1, self.programs["train"], state)
        rate = learning_rate(run.learning_rate, run.steps, index)
        self._move(DATA, index + 1)
        began = time.perf_counter()
        batch = next(self.phases.loader)
        waited = time.perf_counter() - began
        is_late = self._metrics.is_idle()
        self._move(COMPUTING, index + 1)
        arrays = self.phases.placement.to_devices(batch)
        limits = self.spikes.limits(index + 1)
        spike_limits = (limits.arrays(),) if self.program.optimizer.skip_spikes else ()
        inputs = (*self.frozen, arrays, np.float32(rate), *spike_limits)
        with self.profiler.annotate(index + 1):
            outputs = self._compute(self.programs["train"], state, inputs, index + 1)
        if not self._is_journal_open:
            self._open_journal()  # while it computes
        self._finish_pending_step()
        self._raise_or_report_in_background(index)
        metrics = outputs["metrics"]
        self._metrics.pending = PendingStep(index + 1, metrics, rate, waited, is_late, limits)
        return outputs["state"]

    def _raise_or_report_in_background(self, index: int) -> None:
        """Raise what failed beside the steps; report a checkpoint that is now complete."""
        self._saves.report_if_written()
        self.data_check.raise_if_damaged()
        if index == self.start + 1 and self.program.target.platform == "cpu":
            use_huge_pages()  # heap of the first step, which has completed

    def _evaluate_and_save(self, state: Tree, completed_steps: int) -> bool:
        """Evaluate and save as is due after a step; return whether the run stops there."""
        run, evaluated, is_best = self.run, None, False
        if is_evaluation_due(run, completed_steps):
            evaluated, is_best = self._evaluate(completed_steps, state)
            self._sample(completed_steps, state)
        if are_scores_due(run, completed_steps):
            self._score_tasks(completed_steps, state)
        is_stopping = self.stop.should_stop() or self._has_stalled()
        is_last = is_stopping or completed_steps == run.steps
        is_whole = is_last or (is_best and run.checkpoints.keep_best)
        if is_whole or completed_steps % run.checkpoints.local_every == 0:
            self._finish_pending_step()  # checks that the loss is finite before saving
            self.data_check.raise_if_damaged()
            self._move(SAVING, completed_steps)
            is_whole = is_whole or self.checkpoints.is_due_whole(completed_steps)
            self._saves.save(
                completed_steps,
                state,
                validation_loss=evaluated,
                journal=self._journal_position,
                is_whole=is_whole,
                is_last=is_last,
            )
        return is_stopping

    def _end(self, state: Tree, completed_steps: int) -> RunSummary:
        """Finish what the last step began, and return the summary."""
        self._end_profile(completed_steps, state)
        self._finish_pending_step()
        self._metrics.warn_if_all_skipped(completed_steps - self.start)
        self._move(SAVING, completed_steps)  # until the last checkpoint is complete
        self._saves.finish()
        self.timeline.move(STOP)
        summary = self._summary(completed_steps)
        self.notify("on_run_end", summary)
        return summary

    def _end_profile(self, completed_steps: int, state: Tree) -> None:
        """End the profile of steps that have another program, or none, after them."""
        if self.profiler.is_capturing:
            self._finish_pending_step()
            self.profiler.end(self.programs["train"], state, completed_steps)

    def _summary(self, completed_steps: int) -> RunSummary:
        run, stop, loss = self.run, self.stop, self._validation_loss
        is_evaluated = run.data.validation is None or loss is not None
        is_scored = not self._evaluations.gave_up_scores
        is_complete = completed_steps == run.steps and is_evaluated and is_scored
        stopped = stop.signal.name if stop.signal and not is_complete else None
        return RunSummary(
            Path(run.directory),
            completed_steps,
            self.start or None,
            loss,
            stopped,
            self.history.best_step,
            stopped is None and completed_steps < run.steps,
        )

    def _has_stalled(self) -> bool:
        return self.history.has_stalled(self.run.early_stopping_patience)

    def _compute(self, step: Any, state: Tree, inputs: tuple[Any, ...], number: int) -> Tree:
        """Return the outputs of a step; every run.verify_every steps, compute it twice."""

        def compute(state: Tree) -> Tree:
            return step(state, *inputs)

        every = self.run.verify_every
        if every is None or number % every:
            return compute(state)
        return verified_step(self.programs, compute, state, number)

    def _finish_pending_step(self) -> None:
        """Wait for the metrics of the last step and write them, unless they are written."""
        if self._metrics.pending is not None:
            self._metrics.finish(self._write)

    def _evaluate(self, completed_steps: int, state: Tree) -> tuple[float | None, bool]:
        """Return the validation loss, None if it was given up, and whether it is the lowest."""
        self._validation_loss = None
        if self.run.data.validation is None:
            return None, False
        self._finish_pending_step()
        losses = self._evaluations.validation_losses(completed_steps, state)
        if losses is None:
            return None, False
        finite = {name: if_finite(loss) for name, loss in losses.items()}
        self._write({"step": completed_steps, **finite})
        self._metrics.restart_clock()
        self._validation_loss = loss = losses["validation_loss"]
        return loss, self.history.add(completed_steps, loss)

    def _sample(self, completed_steps: int, state: Tree) -> None:
        """Continue the prompts of run.samples."""
        if self.samples is None or self.stop.should_stop():
            return
        self._finish_pending_step()
        self._evaluations.sample(completed_steps, state)
        self._metrics.restart_clock()

    def _score_tasks(self, completed_steps: int, state: Tree) -> None:
        """Evaluate run.tasks."""
        if self.tasks is None:
            return
        self._finish_pending_step()
        scores = self._evaluations.scores(completed_steps, state)
        self._metrics.restart_clock()
        if scores is not None:
            self._write({"step": completed_steps, **scores})


def _move(watchdog: Watchdog, timeline: Timeline, stage: str, step: int, batch: int = 0) -> None:
    """Note what this process does now, for the watchdog and for goodput."""
    watchdog.move(stage, step, batch)
    timeline.move(ACTIVITY_OF_STAGE[stage])
