"""Steps of a run: train, evaluate, save, and report what happened."""

from __future__ import annotations

import itertools
import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import lowering
from graphtrain.checkpoints.checkpoint import Checkpoints
from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema import Program, Run, is_imported
from graphtrain.cost_model.native_equivalent import sizes_unknown
from graphtrain.cost_model.product_peaks import step_peak
from graphtrain.cost_model.tower import useful_step_flops
from graphtrain.errors import TrainingError
from graphtrain.graphs.names import EVALUATE_AVERAGED, SPIKE
from graphtrain.models.optimizer_state import EMA
from graphtrain.run.agreement import on_all_ranks
from graphtrain.run.batch_placement import BatchPlacement, index_share
from graphtrain.run.data_check import DataCheck
from graphtrain.run.events import RunSummary
from graphtrain.run.finite_weights import check_finite_weights
from graphtrain.run.goodput.activities import ACTIVITY_OF_STAGE, STOP
from graphtrain.run.goodput.timeline import Timeline
from graphtrain.run.learning_rate import learning_rate
from graphtrain.run.metrics import Record, good_steps, read_journal
from graphtrain.run.phases import PhaseSequence
from graphtrain.run.profiles.capture import Profiler
from graphtrain.run.programs import LoadedPrograms
from graphtrain.run.signals import StopRequest
from graphtrain.run.spikes import NAME as SPIKES_NAME
from graphtrain.run.spikes import (
    Limits,
    RewindRun,
    SpikeRecord,
    SpikeWindow,
    write_spike,
)
from graphtrain.run.stalls import (
    COMPUTING,
    DATA,
    EVALUATING,
    LOADING,
    SAMPLING,
    SAVING,
    SCORING,
)
from graphtrain.run.step_collectives import first_collective, largest_collective
from graphtrain.run.validation_history import ValidationHistory
from graphtrain.run.verification import compare_replicas, verified_step
from graphtrain.run.watchdog import Watchdog
from lowering.machine.memory_pages import use_huge_pages
from lowering.trees import Tree
from lowering.xla import distributed

if TYPE_CHECKING:
    from graphtrain.run.training_samples import TrainingSamples
    from graphtrain.run.training_tasks import TrainingTasks

Report = Callable[[Record], None]
Notify = Callable[..., None]  # called with the name of an event and its arguments
JournalPosition = Callable[[], dict[str, Any] | None]
_COMMON_METRICS = ("loss", "grad_norm", "targets")  # metrics of every loss function


def is_evaluation_due(run: Run, step: int) -> bool:
    """Return whether the run evaluates after a step."""
    every = run.evaluate_every
    return step == run.steps or bool(every and step % every == 0)


def are_scores_due(run: Run, step: int) -> bool:
    """Return whether the run evaluates its tasks after a step."""
    if run.tasks is None:
        return False
    every = run.tasks.every
    if every is None:
        return is_evaluation_due(run, step)
    return step == run.steps or step % every == 0


def run_validation_batches(
    run: Run, program: Program, rows: np.ndarray | None = None
) -> Iterable[dict[str, np.ndarray]]:
    """Return the batches of one evaluation of a run; of each, the named rows."""
    from graphtrain.run.evaluate import validation_batches

    return validation_batches(
        run.data,
        program,
        program.model.vocab_tokens,
        run.evaluate_batches,
        rows=rows,
        share=index_share(),
    )


def is_overflow(metrics: Mapping[str, Any]) -> bool:
    """Return whether a step was skipped because its gradients overflowed by their scale.

    At a loss scale of 1 or less the scale is not the reason.
    """
    return (
        not math.isfinite(float(metrics["grad_norm"])) and float(metrics.get("loss_scale", 0)) > 1
    )


def _if_finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


@dataclass(frozen=True)
class PendingStep:
    """A step that was started, and whose metrics are not read yet."""

    number: int
    metrics: Tree  # on the devices
    learning_rate: float
    waited: float  # seconds for its batch
    is_late: bool  # no step was being computed when the batch came
    limits: Limits


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
    _pending: PendingStep | None = None
    _saving: int | None = None  # step of the checkpoint that is being written
    _has_trained: bool = False  # a step of this start was not skipped
    _gave_up_scores: bool = False  # of the last evaluation of tasks, because of a signal
    _last_finished_at: float = field(default_factory=time.perf_counter)
    _flops: dict[str, float] = field(init=False)  # useful FLOPs per token, by metric name

    def __post_init__(self) -> None:
        self._prepare_phase()

    @property
    def program(self) -> ResolvedProgram:
        return self.phases.current.phase.program

    @property
    def programs(self) -> LoadedPrograms:
        return self.phases.current.programs

    @property
    def loader(self) -> Any:
        return self.phases.loader

    def _prepare_phase(self) -> None:
        """Derive what depends on the program of the current phase."""
        record = self.programs["train"].record
        self.watchdog.largest_collective = largest_collective(record)
        self.watchdog.first_collective = first_collective(record, distributed.count())
        program = self.program.settings
        if sizes_unknown(program):
            self._flops = record.get("flops_per_token", {})
        else:
            self._flops = useful_step_flops(program)

    def _begin_next_phase(self, index: int) -> None:
        """Go on with the program and the batches of the next phase; the state stays as it is."""
        self._finish_pending_step()
        self._move(LOADING, index + 1)
        self.phases.advance()
        self._prepare_phase()
        self._last_finished_at = time.perf_counter()  # do not count loading as step time

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
        run, target, stop = self.run, self.program.target, self.stop
        validation, completed_steps, opened = None, self.start, False
        if stop.should_stop():  # while the run was loading; there is nothing new to save
            return self._summary(completed_steps, None)
        if evaluate_first or score_first:
            self._write, self._journal_position = self.open_journal()
            opened = True
        if evaluate_first:
            validation, _ = self._evaluate(self.start, state)
            self._sample(self.start, state)
        if score_first:
            self._score_tasks(self.start, state)
        for index in range(self.start, run.steps):
            # In the first evaluation. A signal that comes later is seen where the step is saved.
            if index == self.start and (stop.signal is not None or self._has_stalled()):
                break
            if self.phases.is_over(index):
                self._end_profile(index, state)
                self._begin_next_phase(index)
            if self.profiler.is_due(index + 1):
                self._finish_pending_step()
                self.profiler.move(index + 1, self.programs["train"], state)
            rate = learning_rate(run.learning_rate, run.steps, index)
            self._move(DATA, index + 1)
            batch, waited = self._next_batch()
            is_late = self._is_idle()
            self._move(COMPUTING, index + 1)
            arrays = self.phases.placement.to_devices(batch)
            step = self.programs["train"]
            limits = self.spikes.limits(index + 1)
            spike_limits = (limits.arrays(),) if self.program.optimizer.skip_spikes else ()
            inputs = (*self.frozen, arrays, np.float32(rate), *spike_limits)
            with self.profiler.annotate(index + 1):
                outputs = self._compute(step, state, inputs, index + 1)
            state, completed_steps = outputs["state"], index + 1
            if not opened:
                self._write, self._journal_position = self.open_journal()  # while it computes
                opened = True
            self._finish_pending_step()
            self.checkpoints.raise_if_failed()
            if not self.checkpoints.is_writing():
                self._report_checkpoint()
            self.data_check.raise_if_damaged()
            if index == self.start + 1 and target.platform == "cpu":
                use_huge_pages()  # heap of the first step, which has completed
            self._pending = PendingStep(
                completed_steps, outputs["metrics"], rate, waited, is_late, limits
            )
            last = completed_steps == run.steps
            evaluated, is_best = None, False
            if is_evaluation_due(run, completed_steps):
                evaluated, is_best = self._evaluate(completed_steps, state)
                validation = evaluated
                self._sample(completed_steps, state)
            if are_scores_due(run, completed_steps):
                self._score_tasks(completed_steps, state)
            stopping = stop.should_stop() or self._has_stalled()
            is_due = completed_steps % run.checkpoints.local_every == 0
            is_whole = last or stopping or (is_best and run.checkpoints.keep_best)
            if is_due or is_whole:
                self._finish_pending_step()  # checks that the loss is finite before saving
                self.data_check.raise_if_damaged()
                self._move(SAVING, completed_steps)
                is_whole = is_whole or self.checkpoints.is_due_whole(completed_steps)
                self._save(completed_steps, state, evaluated, is_whole, last or stopping)
            if stopping:
                break
        self._end_profile(completed_steps, state)
        self._finish_pending_step()
        self._warn_if_all_skipped(completed_steps)
        self._move(SAVING, completed_steps)  # until the last checkpoint is complete
        self.checkpoints.wait()
        self._report_checkpoint()
        self.timeline.move(STOP)
        summary = self._summary(completed_steps, validation)
        self.notify("on_run_end", summary)
        return summary

    def _end_profile(self, completed_steps: int, state: Tree) -> None:
        """End the profile of steps that have another program, or none, after them."""
        if self.profiler.is_capturing:
            self._finish_pending_step()
            self.profiler.end(self.programs["train"], state, completed_steps)

    def _summary(self, completed_steps: int, validation: float | None) -> RunSummary:
        run, stop = self.run, self.stop
        is_evaluated = run.data.validation is None or validation is not None
        is_complete = completed_steps == run.steps and is_evaluated and not self._gave_up_scores
        stopped = stop.signal.name if stop.signal and not is_complete else None
        return RunSummary(
            Path(run.directory),
            completed_steps,
            self.start or None,
            validation,
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

    def _save(
        self,
        completed_steps: int,
        state: Tree,
        validation_loss: float | None,
        is_whole: bool,
        is_last: bool,
    ) -> None:
        if self.run.verify_every is not None:
            compare_replicas(self.programs, state, completed_steps)
        self.checkpoints.wait()
        self._report_checkpoint()  # before the next step is noted, on all ranks alike
        arrays = lowering.backend(self.program.target).checkpoint_arrays(state)
        if is_last:  # no further step uses these weights
            check_finite_weights(
                arrays["parameters"],
                completed_steps,
                self._last_good,
                has_constants=is_imported(self.program.model),
            )
        self.checkpoints.save(
            completed_steps,
            arrays,
            self.loader.state(),
            validation_loss=validation_loss,
            is_whole=is_whole,
            journal=self._journal_position(),
            identity=self.phases.current.identity,
            changes=self.changes,
            spikes=self.spikes.state(),
        )
        self._saving = completed_steps if is_whole else None

    def _last_good(self) -> str:
        """Return the newest checkpoint from which a step had a finite loss, or "none"."""
        known = good_steps(read_journal(Path(self.run.directory)))
        good = [step for step in self.checkpoints.steps() if step in known]
        return str(self.checkpoints.path(good[-1])) if good else "none"

    def _warn_if_all_skipped(self, completed_steps: int) -> None:
        """Warn if gradients overflowed in every step since the start: nothing was trained."""
        if completed_steps == self.start or self._has_trained or distributed.rank():
            return
        warnings.warn(
            f"all {completed_steps - self.start} steps of this start were skipped, because their "
            "gradients overflowed in float16: the weights have not changed; train longer, so that "
            "the loss scale falls, or lower program.precision.initial_scale",
            stacklevel=1,
        )

    def _report_checkpoint(self) -> None:
        """Notify the callbacks of the checkpoint that was being written and is now complete."""
        if self._saving is not None:
            self.notify("on_checkpoint", self._saving, self.checkpoints.path(self._saving))
            self._saving = None

    def _move(self, stage: str, step: int, batch: int = 0) -> None:
        """Note what this process does now, for the watchdog and for goodput."""
        self.watchdog.move(stage, step, batch)
        self.timeline.move(ACTIVITY_OF_STAGE[stage])

    def _is_idle(self) -> bool:
        """Return whether every step that was started is complete."""
        if self._pending is None:
            return True
        loss = self._pending.metrics["loss"]
        return loss.is_ready() if hasattr(loss, "is_ready") else True

    def _next_batch(self) -> tuple[dict[str, np.ndarray], float]:
        """Return this process's rows of the next batch, and the seconds waited for them."""
        start_time = time.perf_counter()
        return next(self.loader), time.perf_counter() - start_time

    def _finish_pending_step(self) -> None:
        """Wait for the metrics of the last started step, check that they are finite, write them.

        Raises:
            TrainingError: the step is a spike, and a smaller loss scale or run.spikes cannot help.
            RewindRun: the step is a spike, and the run returns to a checkpoint.
        """
        if (pending := self._pending) is None:
            return
        self._pending = None
        completed_steps, metrics = pending.number, pending.metrics
        loss, norm = float(metrics["loss"]), float(metrics["grad_norm"])
        extra_metrics: dict[str, float | int | None] = {
            name: float(metrics[name]) for name in metrics if name not in _COMMON_METRICS
        }
        is_spike = not is_overflow(metrics) and pending.limits.exceeded_by(metrics)
        self._has_trained |= not is_overflow(metrics)
        if SPIKE in metrics:
            extra_metrics[SPIKE] = int(is_spike)
        if is_spike or is_overflow(metrics):
            extra_metrics = {name: _if_finite(value) for name, value in extra_metrics.items()}
        if "skipped_steps" in metrics:
            extra_metrics["skipped_steps"] = int(metrics["skipped_steps"])
        now = time.perf_counter()
        seconds, self._last_finished_at = now - self._last_finished_at, now
        self.timeline.finish_step(completed_steps, pending.waited if pending.is_late else None)
        if is_spike:
            self._handle_spike(pending, loss, norm)
        elif math.isfinite(loss):
            self.spikes.accept(completed_steps, loss)
        tokens_per_second = self.program.batch.tokens / seconds
        self._write(
            {
                "step": completed_steps,
                "loss": _if_finite(loss),
                "grad_norm": _if_finite(norm),
                **extra_metrics,
                "learning_rate": pending.learning_rate,
                "targets": int(metrics["targets"]),
                "step_seconds": round(seconds, 6),
                "data_wait_seconds": round(pending.waited, 6),
                "tokens_per_second": round(tokens_per_second, 2),
                **self._utilization(tokens_per_second),
                "memory_bytes": lowering.backend(self.program.target).memory_in_use(),
            }
        )

    def _handle_spike(self, pending: PendingStep, loss: float, norm: float) -> None:
        """Record a spike; return if its step was left undone, so that the run goes on.

        Raises:
            TrainingError: it stops the run.
            RewindRun: the run returns to a checkpoint.
        """
        directory, settings = Path(self.run.directory), self.run.spikes
        stops = settings.on_spike == "stop"
        checkpoint = data = None
        if settings.on_spike == "rewind":
            self.checkpoints.wait()  # until the last checkpoint is complete
            checkpoint = self.checkpoints.newest()
            data = self.loader.state_after(pending.number, at=checkpoint)
            rewinds = self.rewinds if checkpoint == self.start else 0
            stops = rewinds >= settings.max_consecutive
        elif settings.on_spike == "skip":
            stops = self.spikes.skip()
        record = SpikeRecord(
            step=pending.number,
            on_spike="stop" if stops else settings.on_spike,
            loss=_if_finite(loss),
            grad_norm=_if_finite(norm),
            loss_limit=_if_finite(pending.limits.loss),
            grad_norm_limit=_if_finite(pending.limits.grad_norm),
            documents={},
            checkpoint=None if stops else checkpoint,
            data=None if stops else data,
        )
        if distributed.rank() == 0:
            found = self.loader.documents(pending.number - 1)
            documents = {prefix: array.tolist() for prefix, array in found.items()}
            write_spike(directory, replace(record, documents=documents))
        if stops:
            raise TrainingError(self._spike(pending, loss, norm))
        if checkpoint is not None:
            raise RewindRun(record)
        if distributed.rank() == 0:
            warnings.warn(
                f"step {pending.number} was skipped: loss {loss:.6g}, gradient norm {norm:.6g}, "
                f"limits: {pending.limits.describe()}; its documents are in "
                f"{directory / SPIKES_NAME}",
                stacklevel=1,
            )

    def _utilization(self, tokens_per_second: float) -> dict[str, float | None]:
        """Return the model FLOPs utilization (MFU); None if FLOPs or the peak are unknown."""
        peak, flops_per_token = (
            step_peak(self.program),
            self._flops,
        )
        return {
            name: round(flops_per_token[name] * tokens_per_second / peak, 6)
            if peak and flops_per_token
            else None
            for name in ("mfu", "mfu_causal")
        }

    def _spike(self, pending: PendingStep, loss: float, norm: float) -> str:
        """Say which step is a spike, of which documents, and what can be done."""
        self.checkpoints.wait()  # until the last checkpoint is complete
        saved, good = self.checkpoints.steps(), self._last_good()
        is_finite = math.isfinite(loss) and math.isfinite(norm)
        above = f", above run.spikes ({pending.limits.describe()})" if is_finite else ""
        text = (
            f"step {pending.number}: loss {loss}, gradient norm {norm}{above}; the batch contains "
            f"{self.loader.describe(pending.number - 1)}; last good checkpoint: " + good
        )
        if saved and good != (newest := str(self.checkpoints.path(saved[-1]))):
            text += (
                f"; {newest} is newer, but no step from it was finite: "
                "move it away to resume from the one before it"
            )
        if self.run.spikes.on_spike != "stop":
            most = self.run.spikes.max_consecutive
            what = "skipped step" if self.run.spikes.on_spike == "skip" else "rewind"
            several = "" if most == 1 else "s in a row"
            return f"{text}; {most} {what}{several} did not help (run.spikes.max_consecutive)"
        return text + (
            "; the same command meets the same batch again: lower run.learning_rate.peak or "
            "program.optimizer.clip_norm (and permit it with --allow-change NAME), take these "
            'documents out of the data, or leave them out with run.spikes.on_spike = "rewind"'
        )

    def _evaluate(self, completed_steps: int, state: Tree) -> tuple[float | None, bool]:
        """Return the validation loss, None if it was given up, and whether it is the lowest."""
        loss = self._validate(completed_steps, state)
        return loss, loss is not None and self.history.add(completed_steps, loss)

    def _validate(self, completed_steps: int, state: Tree) -> float | None:
        run = self.run
        if run.data.validation is None:
            return None
        from graphtrain.run.evaluate import validation_loss

        self._finish_pending_step()
        target, number = self.program.target, itertools.count()

        def should_stop(_: int) -> bool:
            self._move(EVALUATING, completed_steps, next(number))
            self.checkpoints.raise_if_failed()
            return self.stop.should_stop()

        weights = {"evaluate": ("validation_loss", state["parameters"])}
        if (average := state["optimizer"].get(EMA)) is not None:
            named = "averaged_validation_loss", {"optimizer": {EMA: average}}
            weights[EVALUATE_AVERAGED] = named
        losses = {}
        for graph, (name, tree) in weights.items():
            evaluate = self.programs[graph]
            rows = BatchPlacement(evaluate.inputs("batch"), target).rows
            batches = on_all_ranks(
                partial(run_validation_batches, run, self.program.settings, rows)
            )
            inputs = tree, *self.frozen
            loss = validation_loss(evaluate, inputs, batches, target, should_stop=should_stop)
            if loss is None:
                return None
            losses[name] = loss
        finite = {name: _if_finite(loss) for name, loss in losses.items()}
        self._write({"step": completed_steps, **finite})
        loss = losses["validation_loss"]
        self._last_finished_at = time.perf_counter()  # do not count the evaluation as step time
        return loss

    def _sample(self, completed_steps: int, state: Tree) -> None:
        """Continue the prompts of run.samples. A failure is a warning, and the run continues."""
        if self.samples is None or self.stop.should_stop():
            return
        self._finish_pending_step()

        def should_stop(prompt: int) -> bool:
            self._move(SAMPLING, completed_steps, prompt)
            return self.stop.should_stop()

        self._move(SAMPLING, completed_steps)
        try:
            self.samples.write(completed_steps, state["parameters"], should_stop)
        except Exception as error:
            warnings.warn(f"no samples of step {completed_steps}: {error}", stacklevel=1)
        self._last_finished_at = time.perf_counter()  # do not count the samples as step time

    def _score_tasks(self, completed_steps: int, state: Tree) -> None:
        """Evaluate run.tasks. A failure is a warning, and the run continues."""
        if self.tasks is None:
            return
        self._finish_pending_step()

        def should_stop(request: int) -> bool:
            self._move(SCORING, completed_steps, request)
            return self.stop.should_stop()

        self._move(SCORING, completed_steps)
        try:
            scores = self.tasks.scores(completed_steps, state["parameters"], should_stop)
        except Exception as error:
            warnings.warn(f"no scores of step {completed_steps}: {error}", stacklevel=1)
            return
        finally:
            self._last_finished_at = time.perf_counter()  # do not count it as step time
        self._gave_up_scores = scores is None
        if scores is not None:
            self._write({"step": completed_steps, **scores})
