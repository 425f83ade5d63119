"""What a compilation is asked for, and what became of it."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from os import uname
from typing import Any, Literal

from graphtrain.cache.key import CacheKey
from graphtrain.compile.request_keys import request_keys
from graphtrain.config.schema import Program
from graphtrain.torch_xla.graphs import Extracted

Observer = Callable[[str, str], None]  # label of a graph, what it is doing now


@dataclass(frozen=True)
class Task:
    """One graph to have in the cache."""

    label: str  # what progress and reports call it
    program: Program | Extracted
    graph: str
    request: CacheKey


@dataclass(frozen=True)
class Limits:
    """What a host gives to compiling."""

    jobs: int | None = None  # workers at once; as many as there are cores if None
    memory: int | None = None  # bytes for all workers; what is available at the start if None
    timeout: float | None = None  # seconds after which a worker is stopped
    retries: int = 1  # further attempts for a worker, or its compiler, that was killed


@dataclass(frozen=True)
class Outcome:
    """What became of one graph."""

    label: str
    status: Literal["compiled", "cached", "bundled", "failed"]
    seconds: float
    digest: str | None = None  # of the stored program
    error: str | None = None
    kind: str | None = None  # class of the error, as in "OutOfMemory"
    failure: str | None = None  # directory with the StableHLO and the log
    attempts: int = 1  # 0: known from before
    peak_bytes: int | None = None  # of this host's memory, most that its worker held
    bundle: str | None = None  # directory with what a compiler that is not here would be given
    preflight: dict[str, Any] | None = None  # for Neuron: instructions, their limit, warnings


@dataclass(frozen=True)
class Report:
    """What became of all of them."""

    outcomes: tuple[Outcome, ...]
    seconds: float

    def count(self, status: str) -> int:
        return sum(outcome.status == status for outcome in self.outcomes)

    def as_json(self) -> dict[str, Any]:
        return {
            "total": len(self.outcomes),
            "successful": self.count("compiled"),
            "failed": self.count("failed"),
            "cached": self.count("cached"),
            "bundled": self.count("bundled"),
            "seconds": round(self.seconds, 3),
            "host": uname().nodename,
            "graphs": [asdict(outcome) for outcome in self.outcomes],
        }


def tasks_of(programs: dict[str, Program]) -> list[Task]:
    """The graphs of several programs by name; the name is left out of labels where there is one."""
    return [
        Task(graph if len(programs) == 1 else f"{name} {graph}", program, graph, request)
        for name, program in programs.items()
        for graph, request in request_keys(program).items()
    ]
