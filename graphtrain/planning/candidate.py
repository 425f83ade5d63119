"""One strategy of a search, with its estimate or its compiled numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from graphtrain.cache.sizes import format_size
from graphtrain.config.resolve import ResolvedProgram
from graphtrain.cost_model.assessment import Assessment, Memory, StepTime
from graphtrain.planning.costs import Cost, Workload
from graphtrain.planning.formats import format_seconds, format_share
from sharding_rules.mesh import MeshShape


@dataclass(frozen=True)
class Candidate:
    """One strategy and its estimate."""

    program: ResolvedProgram
    memory: Memory
    time: StepTime | None = None  # None if the program does not fit
    mfu: float | None = None  # None if unknown
    sent_bytes: float = 0.0  # by one device in a step
    equal: int = 0  # number of strategies with equal numbers that this one stands for
    relative_batch: float = 1.0  # its global batch over that of the configuration
    estimated: Candidate | None = None  # estimate of a strategy that was compiled since
    note: str = ""  # why it was not compiled, or what its compiler could not report
    refused: bool = False  # its step cannot be traced; the note says why

    @property
    def fits(self) -> bool:
        """Return whether the step can be computed, and a device has the memory for it."""
        return self.memory.fits and not self.refused

    @property
    def is_compiled(self) -> bool:
        return self.estimated is not None

    @property
    def is_timed(self) -> bool:
        """Return whether its time is by a profile of the machine."""
        return self.time is not None and self.time.measured is not None

    @property
    def mesh(self) -> MeshShape:
        return self.program.mesh

    @property
    def seconds(self) -> float:
        """Known time of a step; infinite if the program does not fit."""
        return math.inf if self.time is None else self.time.known

    @property
    def is_lower_bound(self) -> bool:
        """Return whether a part of the time is unknown."""
        return self.time is not None and not self.time.is_complete

    @property
    def shown_seconds(self) -> str:
        """Time of a step as text."""
        total = None if self.time is None else self.time.total
        bound = "at least " if self.is_lower_bound and total is not None else ""
        return bound + format_seconds(total)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens that a step trains in a second; None if its time is unknown or only a bound."""
        if self.time is None or not self.time.is_complete:
            return None
        return self.program.batch.tokens / self.time.known

    @property
    def rank(self) -> tuple[float, float, float, float, int]:
        """Sort key: time of a step to three digits, then the batch, then communication.

        Steps of several batches are compared by the time of as many tokens as the configuration
        has, and of equal ones the smallest batch is first. The overlap of communication is
        uncertain, so its whole time counts next; where the speed of the links is unknown, the bytes
        that are sent do.
        """
        times = self.time.communication.values() if self.time else ()
        sent = sum(seconds or 0.0 for seconds in times) / self.relative_batch
        pace = float(f"{self.seconds / self.relative_batch:.3g}")
        sent_bytes = self.sent_bytes / self.relative_batch
        return pace, self.relative_batch, sent, sent_bytes, self.memory.peak

    def compiled(self, assessment: Assessment) -> Candidate:
        """Return the strategy with the numbers of a compiled step, or the reason why it has none.

        The memory that the device has is that of the search.
        """
        if assessment.memory.source != "compiler":
            memory = replace(
                self.memory, compiler_out_of_memory=assessment.memory.compiler_out_of_memory
            )
            return replace(self, memory=memory, note=assessment.note)
        return replace(
            self,
            memory=replace(assessment.memory, capacity=self.memory.capacity),
            time=assessment.time,
            mfu=assessment.mfu,
            sent_bytes=sum(each.wire_bytes_per_step for each in assessment.collectives),
            estimated=self,
            note=assessment.note,
        )

    def cost(self, workload: Workload) -> Cost:
        """Return what a workload takes with this strategy."""
        return workload.cost(
            self.program.target, self.program.model.dtype, self.program.batch.tokens, self.time
        )

    @property
    def figures(self) -> tuple[str, str, str, str]:
        """Step time, utilization, bytes sent and peak memory as text."""
        return (
            self.shown_seconds,
            format_share(self.mfu),
            format_size(round(self.sent_bytes)),
            format_size(self.memory.peak),
        )

    def choice(self, family: str) -> str:
        """Return the candidate's choice in a family, for example "16" for tensor."""
        rules, sizes, program = self.program.settings.rules, self.mesh.axes, self.program
        if family == "zero":
            return next((name[-1] for name in ("zero1", "zero2") if name in rules), "none")
        if family == "sequence":
            return "none" if sizes["tensor"] == 1 else "on" if "sequence" in rules else "off"
        if family == "schedule":
            pipeline = program.pipeline
            whole = "" if pipeline.recompute_stages else ", stages not recomputed"
            named = f"{pipeline.schedule} x {pipeline.virtual_stages}{whole}"
            return "none" if sizes["stage"] == 1 else named
        if family == "moments":
            return "on the host" if program.optimizer.offload_to_host else "on the device"
        if family == "batch":
            return str(program.batch.global_batch_size)
        return program.model.remat if family == "remat" else str(sizes[family])

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of [program] that the candidate sets."""
        program, pipeline = self.program, self.program.pipeline
        staged = {
            "schedule": pipeline.schedule,
            "virtual_stages": pipeline.virtual_stages,
            "recompute_stages": pipeline.recompute_stages,
        }
        return {
            "mesh": {name: size for name, size in self.mesh.axes.items() if size > 1},
            "rules": list(program.settings.rules),
            "global_batch_size": program.batch.global_batch_size,
            "microbatches": program.batch.microbatches,
            "remat": program.model.remat,
            "offload_to_host": program.optimizer.offload_to_host,
            **({"pipeline": staged} if self.mesh.axes["stage"] > 1 else {}),
        }
