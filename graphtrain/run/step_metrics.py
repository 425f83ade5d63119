"""Metrics of the steps of a run: those of a step are read while the next one computes."""

from __future__ import annotations

import math
import time
import warnings

import lowering
from graphtrain.config.resolve import ResolvedProgram
from graphtrain.run.goodput.timeline import Timeline
from graphtrain.run.metrics import Report
from graphtrain.run.pending_step import PendingStep
from graphtrain.run.phases import PhaseSequence
from graphtrain.run.spike_response import SpikeResponse
from graphtrain.run.utilization import flops_per_token, utilization
from lowering.xla import distributed


class StepMetrics:
    """Metrics of the last step that was started, and its time."""

    def __init__(self, phases: PhaseSequence, timeline: Timeline, response: SpikeResponse) -> None:
        """Begin to count the time of the first step.

        Args:
            phases: Phases of the run.
            timeline: Records the time of steps.
            response: What the run does after a spike.
        """
        self._phases, self._timeline, self._response = phases, timeline, response
        self.pending: PendingStep | None = None
        self._has_trained = False  # a step of this start was not skipped
        self._last_finished_at = time.perf_counter()
        self.prepare_phase()

    @property
    def _program(self) -> ResolvedProgram:
        return self._phases.current.phase.program

    def prepare_phase(self) -> None:
        """Derive the useful FLOPs per token of the current phase."""
        record = self._phases.current.programs["train"].record
        self._flops = flops_per_token(self._program, record)

    def is_idle(self) -> bool:
        """Return whether every step that was started is complete."""
        return self.pending is None or self.pending.is_complete

    def restart_clock(self) -> None:
        """Count nothing before now as time of a step."""
        self._last_finished_at = time.perf_counter()

    def finish(self, write: Report) -> None:
        """Wait for the metrics of the last started step, check that they are finite, write them.

        Args:
            write: Writes a record to the journal.

        Raises:
            TrainingError: the step is a spike, and a smaller loss scale or run.spikes cannot help.
            RewindRun: the step is a spike, and the run returns to a checkpoint.
        """
        pending, self.pending = self.pending, None
        assert pending is not None
        record = pending.record()  # waits for them
        self._has_trained |= not pending.is_overflow
        now = time.perf_counter()
        seconds, self._last_finished_at = now - self._last_finished_at, now
        self._timeline.finish_step(pending.number, pending.waited if pending.is_late else None)
        if pending.is_spike:
            self._response.respond(pending, self._phases.loader)
        elif math.isfinite(pending.loss):
            self._response.window.accept(pending.number, pending.loss)
        tokens_per_second = self._program.batch.tokens / seconds
        write(
            {
                **record,
                "step_seconds": round(seconds, 6),
                "data_wait_seconds": round(pending.waited, 6),
                "tokens_per_second": round(tokens_per_second, 2),
                **utilization(self._program, self._flops, tokens_per_second),
                "memory_bytes": lowering.backend(self._program.target).memory_in_use(),
            }
        )

    def warn_if_all_skipped(self, steps: int) -> None:
        """Warn if gradients overflowed in every step since the start: nothing was trained.

        Args:
            steps: Number of steps since the start.
        """
        if not steps or self._has_trained or distributed.rank():
            return
        warnings.warn(
            f"all {steps} steps of this start were skipped, because their "
            "gradients overflowed in float16: the weights have not changed; train longer, so that "
            "the loss scale falls, or lower program.precision.initial_scale",
            stacklevel=1,
        )
