"""Compilation tasks, their limits and their outcomes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from os import uname
from typing import Any, Literal

from graphtrain.cache.key import CacheKey
from graphtrain.compile.html import html_table
from graphtrain.compile.request_keys import request_keys
from graphtrain.config.phases import training_phases
from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema import Run
from graphtrain.errors import GraphtrainError
from graphtrain.graphs.names import VERIFICATION_GRAPHS, Purpose, graphs_for, purpose_while_training
from graphtrain.torch_xla.graphs import ExtractedGraph

Observer = Callable[[str, str], None]  # called with the label of a task and its current stage


@dataclass(frozen=True)
class Task:
    """One graph to compile into the cache."""

    label: str  # name in progress output and reports
    program: ResolvedProgram | ExtractedGraph  # a worker traces it with the rules of `request`
    graph: str
    request: CacheKey
    configuration: str = ""  # as its user named it, for listings of the cache


@dataclass(frozen=True)
class Limits:
    """Limits on the resources of one host for compiling."""

    jobs: int | None = None  # maximum number of workers at once; None: number of cores
    memory: int | None = None  # bytes for all workers; None: available memory at the start
    timeout: float | None = None  # seconds after which a worker is stopped; None: no limit
    retries: int = 1  # further attempts if a worker or its compiler is killed


@dataclass(frozen=True)
class TaskOutcome:
    """Outcome of one task."""

    label: str
    status: Literal["compiled", "cached", "bundled", "failed"]
    seconds: float
    digest: str | None = None  # of the program in the cache
    error: str | None = None
    kind: str | None = None  # class of the error, as in "OutOfMemory"
    failure: str | None = None  # directory with the StableHLO and the log
    attempts: int = 1  # 0: a stored failure
    peak_bytes: int | None = None  # peak host memory of the worker
    bundle: str | None = None  # directory with the input of a compiler that is not installed
    preflight: dict[str, Any] | None = None  # for Neuron: instruction count, its limit, warnings


@dataclass(frozen=True)
class CompilationReport:
    """Outcomes of all tasks."""

    outcomes: tuple[TaskOutcome, ...]
    seconds: float

    def count(self, status: str) -> int:
        return sum(outcome.status == status for outcome in self.outcomes)

    def raise_if_failed(self, *, or_bundled: bool = False) -> None:
        """Raise an error if a graph failed or, if asked, its compiler is not installed.

        Raises:
            CompilationFailed: one line for each such graph.
        """
        refused = ("failed", "bundled") if or_bundled else ("failed",)
        lines = [f"{one.label} {one.status}: {one.error}" for one in self.outcomes
                 if one.status in refused]  # fmt: skip
        if lines:
            raise CompilationFailed(self, "\n".join(lines))

    def _repr_html_(self) -> str:
        rows = [(one.label, one.status, f"{one.seconds:.1f}", one.error or "")
                for one in self.outcomes]  # fmt: skip
        return html_table(("graph", "status", "seconds", "error"), rows)

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


class CompilationFailed(GraphtrainError):
    """A graph could not be compiled."""

    def __init__(self, report: CompilationReport, message: str) -> None:
        super().__init__(message)
        self.report = report


def run_tasks(
    programs: Mapping[str, ResolvedProgram],
    runs: Mapping[str, Run],
    smaller: Mapping[str, Mapping[str, ResolvedProgram]] | None = None,
) -> list[Task]:
    """Return the tasks of the graphs that runs need: of all phases, run.samples and run.tasks.

    Args:
        programs: Programs by name.
        runs: Settings of the runs, by the same names.
        smaller: For each name, the programs of run.fallback, by labels.
    """
    tasks = []
    for name, program in programs.items():
        parts = [] if len(programs) == 1 else [name]
        meshes = {"": program, **(smaller or {}).get(name, {})}
        for label, on_mesh in meshes.items():
            labels = [*parts, label] if label else parts
            verification = VERIFICATION_GRAPHS if runs[name].verify_every else ()
            tasks += _of_phases(name, on_mesh, "train", labels, verification)
            if (purpose := purpose_while_training(runs[name])) is not None:
                tasks += _tasks(name, on_mesh, purpose, labels)
    return tasks


def run_requests(
    program: ResolvedProgram, run: Run, smaller: Mapping[str, ResolvedProgram]
) -> dict[str, CacheKey]:
    """Return the request keys of all graphs of one run, by label; arguments as of `run_tasks`."""
    tasks = run_tasks({"": program}, {"": run}, {"": smaller})
    return {task.label: task.request for task in tasks}


def _of_phases(
    name: str,
    program: ResolvedProgram,
    purpose: Literal["train", "dump"],
    parts: Sequence[str],
    more: Sequence[str] = (),
) -> list[Task]:
    """Return the tasks of all phases of a run; its first phase computes the initial state."""
    tasks: dict[str, Task] = {}
    for phase in training_phases(program):
        labels = [*parts, phase.label] if phase.label else parts
        for task in _tasks(name, phase.program, purpose, labels, more):
            if task.graph != "init" or not phase.start:
                tasks.setdefault(task.request.digest, task)  # two phases may have one program
    return list(tasks.values())


def tasks_of(programs: Mapping[str, ResolvedProgram], purpose: Purpose = "train") -> list[Task]:
    """Return the tasks of the graphs that a purpose needs; those of a dump are of all phases.

    The name of a single program is left out of labels.
    """
    tasks = []
    for name, program in programs.items():
        parts = [] if len(programs) == 1 else [name]
        if purpose == "dump":
            tasks += _of_phases(name, program, purpose, parts)
        else:
            tasks += _tasks(name, program, purpose, parts)
    return tasks


def _tasks(
    name: str,
    program: ResolvedProgram,
    purpose: Purpose,
    parts: Sequence[str],
    more: Sequence[str] = (),
) -> list[Task]:
    """Return the tasks of a program, with labels that begin with some parts."""
    needed, graphs = graphs_for(program, purpose)
    return [
        Task(" ".join([*parts, graph]), needed, graph, request, name)
        for graph, request in request_keys(needed, [*graphs, *more]).items()
    ]
