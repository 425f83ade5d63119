"""Assessment: memory, collectives and time of a training step, with the source of each number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from graphtrain.cost_model.compute import PartFlops
    from graphtrain.cost_model.measured_time import MeasuredTime
    from lowering.hlo.collectives import Collective
    from lowering.machine.target import Achieved
    from sharding_rules.plan import Plan

Source = Literal["compiler", "estimate"]


@dataclass(frozen=True)
class Memory:
    """Memory of one device during a training step, in bytes.

    The compiler reports the arguments (parameters, frozen, optimizer, batch) and the peak.
    Gradients and activations are estimates; temporaries are the rest of the peak.
    """

    parameters: int
    optimizer: int
    gradients: int
    activations: int
    temporaries: int
    peak: int
    capacity: int  # that arrays can use: of a GPU, the pool of JAX's allocator
    source: Source  # of the peak
    frozen: int = 0  # frozen weights, without gradients and optimizer state
    host: int = 0  # of the host, beside the peak: what is offloaded
    compiler_out_of_memory: bool = False  # the compilation failed with an out-of-memory error

    @property
    def fits(self) -> bool:
        return not self.compiler_out_of_memory and self.peak <= self.capacity


@dataclass(frozen=True)
class StepTime:
    """Estimate of the time of a training step, in seconds; None if unknown.

    The traffic is read from the compiled program or estimated.
    """

    compute: float | None  # products and attention, at the share of the peak in achieved
    memory: float | None  # state, and activations between the products, at the bandwidth
    communication: Mapping[str, float | None]  # by mesh axes, as "fsdp" or "data+fsdp"
    bubble: float | None  # idle time of a pipeline stage
    overlapped: float | None  # part of the communication that overlaps with compute
    host: float | None = 0.0  # transfers to host memory and back that compute does not hide
    achieved: Achieved | None = None  # shares of the peak that compute assumes; None: the peak
    starting: float = 0.0  # of the step, its operations and iterations; only of a profile
    # By a profile of the machine, in which case the other fields are the time by the clock. None:
    # the machine has none, for the reason in profile_note, which is empty if none is possible.
    measured: MeasuredTime | None = None
    profile_note: str = ""
    # Source of the seconds of products, bytes and collectives, where an estimate of a step that is
    # not compiled has those of a profile.
    speeds: str = ""

    @property
    def source(self) -> str:
        """Source of the time, in words."""
        if self.measured is not None:
            return self.measured.source
        return f"estimate, speeds {self.speeds}" if self.speeds else "estimate"

    @property
    def total(self) -> float | None:
        """Time of the step from the parts that are known; None if compute is not."""
        return None if self.compute is None else self.known

    @property
    def known(self) -> float:
        """Time of the parts that are known, by which strategies are compared."""
        sent = sum(seconds or 0.0 for seconds in self.communication.values())
        exposed = sent - (self.overlapped or 0.0)
        parts = self.compute, self.memory, exposed, self.bubble, self.host, self.starting
        return sum(part or 0.0 for part in parts)

    @property
    def is_complete(self) -> bool:
        """Return whether every part is known. If not, the total is only a lower bound."""
        parts = self.compute, self.memory, self.bubble, self.host, *self.communication.values()
        return None not in parts


@dataclass(frozen=True)
class Assessment:
    """Memory, collectives and time of one program on one target."""

    target: str
    plan: Plan  # mesh, and the layout of every array
    memory: Memory
    collectives: tuple[Collective, ...]
    collectives_source: Source
    time: StepTime
    # Model FLOPs utilization, implied by the time. Recomputation is not counted. Causal attention
    # is counted in full if all its scores are computed, and half if a kernel skips the others.
    # None: unknown, because the time is not complete.
    mfu: float | None
    mfu_causal: float | None  # MFU with causal attention counted half
    flops: tuple[PartFlops, ...] = ()  # by part of the model, by arithmetic
    compile_seconds: float | None = None
    chunk: int | None = None  # positions per chunk of the logits; None: the complete sequence
    findings: tuple[str, ...] = ()  # what the step computes or holds without need, and why
    flops_excess: float | None = None  # compiled FLOPs over those expected; None: not compiled
    # Products of a step that were asked for in fp8 or int8, by what the compiler made of each: see
    # lowering.hlo.quantized_products. None: not asked for, or not compiled.
    products: Mapping[str, int] | None = None
    note: str = ""  # why there is no compiled program, or what is unknown about it
