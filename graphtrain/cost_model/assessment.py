"""Assessment: what a training step holds, sends and waits for, and who says so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from lowering.hlo.collectives import Collective
    from sharding_rules.plan import Plan

Source = Literal["compiler", "estimate"]


@dataclass(frozen=True)
class Memory:
    """Bytes of one device in a training step.

    The compiler counts arguments (parameters, frozen, optimizer, batch) and the peak; what of the
    rest is gradients and what activations is an estimate, and temporaries are what those do not
    explain.
    """

    parameters: int
    optimizer: int
    gradients: int
    activations: int
    temporaries: int
    peak: int
    capacity: int  # of the device
    source: Source  # of the peak
    frozen: int = 0  # weights that no step changes: no gradients, no optimizer state
    refused: bool = False  # the compiler found no way to fit the program

    @property
    def fits(self) -> bool:
        return not self.refused and self.peak <= self.capacity


@dataclass(frozen=True)
class StepTime:
    """Seconds of a training step by roofline; an estimate, from measured or predicted traffic."""

    compute: float  # matrix products at the machine's peak, recomputation included
    memory: float  # weights, state and activations through the device's memory
    communication: dict[str, float]  # by mesh axes, as "fsdp" or "data+fsdp"
    bubble: float  # stages waiting for their first microbatch or after their last
    overlapped: float  # of the communication, what hides behind compute

    @property
    def total(self) -> float:
        exposed = sum(self.communication.values()) - self.overlapped
        return max(self.compute, self.memory) + exposed + self.bubble


@dataclass(frozen=True)
class Assessment:
    """One program on one target."""

    target: str
    plan: Plan  # mesh, and the layout of every array
    memory: Memory
    collectives: tuple[Collective, ...]
    collectives_source: Source
    time: StepTime
    mfu: float  # model FLOP utilisation that the time implies; recomputation is not useful work
    mfu_causal: float  # the same, with causal attention counted in half
    compile_seconds: float | None = None
    chunk: int | None = None  # positions of a sequence whose logits exist at once; None: all
    remark: str = ""  # why the compiler was not asked, or what it could not say
