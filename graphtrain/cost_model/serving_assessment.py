"""Assessment of a served model: memory, limits, speed and collectives, with their sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from graphtrain.cost_model.assessment import Source
from graphtrain.cost_model.served_sizes import ServedSizes
from lowering.hlo.collectives import Collective


@dataclass(frozen=True)
class ProgramMemory:
    """Memory of one program on a device, beside weights, KV cache and the state of sampling."""

    graph: str
    temporaries: int  # bytes
    source: Source
    compiler_out_of_memory: bool = False  # the compilation failed with an out-of-memory error
    error: str = ""  # why it is not compiled


@dataclass(frozen=True)
class ServingMemory:
    """Memory of one device while it serves, in bytes."""

    weights: int
    kv_cache: int
    sampling: int
    programs: tuple[ProgramMemory, ...]
    loading: int  # peak while the weights are loaded and cast
    loading_source: Source
    capacity: int  # that arrays can use: of a GPU, the pool of JAX's allocator

    @property
    def resident(self) -> int:
        """Bytes that stay on a device between programs."""
        return self.weights + self.kv_cache + self.sampling

    @property
    def largest(self) -> ProgramMemory:
        """Program that needs most."""
        return max(self.programs, key=lambda program: program.temporaries)

    @property
    def peak(self) -> int:
        return max(self.resident + self.largest.temporaries, self.loading)

    @property
    def fits(self) -> bool:
        refused = any(program.compiler_out_of_memory for program in self.programs)
        return not refused and self.peak <= self.capacity


@dataclass(frozen=True)
class Limit:
    """Largest number of slots, or longest context, that fits."""

    value: int  # 0: none fits
    source: Source  # "compiler": a program of this size was compiled
    # model: it has no more positions. search: more were not tried.
    limited_by: Literal["memory", "model", "search"] = "memory"


@dataclass(frozen=True)
class Speed:
    """Roofline time of one call of a program; None is unknown."""

    what: str  # for example "decode, 8 slots"
    graph: str
    tokens: int  # that it processes
    compute: float | None  # seconds of products at peak FLOP/s
    memory: float | None  # seconds to read weights and KV cache at the bandwidth
    communication: Mapping[str, float | None]  # seconds by mesh axes

    @property
    def is_complete(self) -> bool:
        """Return whether the communication is known. If not, the speed is an upper bound."""
        return None not in self.communication.values()

    @property
    def seconds(self) -> float | None:
        if self.compute is None or self.memory is None:
            return None
        sent = sum(seconds or 0.0 for seconds in self.communication.values())
        return max(self.compute, self.memory) + sent

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens / self.seconds if self.seconds else None


@dataclass(frozen=True)
class ServingAssessment:
    """Memory, limits, speed and collectives of a served model on one target."""

    model: ServedSizes
    memory: ServingMemory
    slots: Limit  # at the context of the model
    context: Limit  # at the slots of the model
    speeds: tuple[Speed, ...]
    collectives: tuple[Collective, ...]  # of a decode step of all slots
    collectives_source: Source
    findings: tuple[str, ...] = ()
    note: str = ""  # why a program is not compiled

    @property
    def target(self) -> str:
        return self.model.program.settings.target
