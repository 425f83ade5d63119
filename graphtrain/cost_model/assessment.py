"""Assessment: memory, collectives and time of a training step, with the source of each number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from lowering.hlo.collectives import Collective
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
    compiler_out_of_memory: bool = False  # the compilation failed with an out-of-memory error

    @property
    def fits(self) -> bool:
        return not self.compiler_out_of_memory and self.peak <= self.capacity


@dataclass(frozen=True)
class StepTime:
    """Roofline estimate of the time of a training step, in seconds.

    The traffic is read from the compiled program or estimated.
    """

    compute: float  # matrix products at peak FLOP/s, including recomputation
    memory: float  # reads and writes of weights, state and activations at the memory bandwidth
    communication: dict[str, float]  # by mesh axes, as "fsdp" or "data+fsdp"
    bubble: float  # idle time of a pipeline stage
    overlapped: float  # part of the communication that overlaps with compute

    @property
    def total(self) -> float:
        exposed = sum(self.communication.values()) - self.overlapped
        return max(self.compute, self.memory) + exposed + self.bubble


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
    mfu: float
    mfu_causal: float  # MFU with causal attention counted half
    compile_seconds: float | None = None
    chunk: int | None = None  # positions per chunk of the logits; None: the complete sequence
    findings: tuple[str, ...] = ()  # what the step computes or holds without need, and why
    flops_excess: float | None = None  # compiled FLOPs over those expected; None: not compiled
    note: str = ""  # why there is no compiled program, or what is unknown about it
