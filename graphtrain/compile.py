"""Every graph of a run through worker processes into the cache.

This process imports neither JAX nor the model: it hands out graphs, watches, and reports.
"""

import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

from graphtrain.cache import Cache
from graphtrain.config.schema import Program
from graphtrain.errors import CacheError
from graphtrain.key import CacheKey
from graphtrain.requests import request_keys
from lowering.errors import OutOfMemory
from lowering.target import Target

# What would be said again, whatever else the machine is doing; full disks and kills are not that.
_FINAL = ("OutOfMemory", "ShardingError")
_LONGEST_FIRST = ("train", "evaluate", "init")

Observer = Callable[[str, str], None]  # label of a graph, what it is doing now


@dataclass(frozen=True)
class Task:
    """One graph to have in the cache."""

    label: str  # what progress and reports call it
    program: Program
    graph: str
    request: CacheKey


@dataclass(frozen=True)
class Outcome:
    """What became of one graph."""

    label: str
    status: Literal["compiled", "cached", "failed"]
    seconds: float
    digest: str | None = None  # of the stored program
    error: str | None = None
    kind: str | None = None  # class of the error, as in "OutOfMemory"
    failure: str | None = None  # directory with the StableHLO and the log
    attempts: int = 1  # 0: known from before


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
            "seconds": round(self.seconds, 3),
            "graphs": [asdict(outcome) for outcome in self.outcomes],
        }


def tasks_of(programs: dict[str, Program]) -> list[Task]:
    """The graphs of several programs by name; the name is left out of labels where there is one."""
    return [
        Task(graph if len(programs) == 1 else f"{name} {graph}", program, graph, request)
        for name, program in programs.items()
        for graph, request in request_keys(program).items()
    ]


def compile_tasks(
    tasks: Sequence[Task],
    cache: Cache,
    *,
    jobs: int | None = None,
    retries: int = 1,
    timeout: float | None = None,
    retry_failed: bool = False,
    observe: Observer = lambda label, stage: None,
) -> Report:
    """Have every graph in the cache; one that fails does not stop the others.

    Args:
        jobs: worker processes at once; as many as there are cores if None. Fewer from when one is
            killed, as the kernel does where memory is short.
        retries: further attempts for a worker that was killed. A compiler's error is final.
        timeout: seconds after which a worker is stopped, and its graph has failed.
        retry_failed: compile also what this compiler refused before.
    """
    began = time.perf_counter()
    outcomes = {
        task.label: _cached(task, cache, observe)
        or (None if retry_failed else _refused(task, cache, observe))
        for task in tasks
    }
    missing = [task for task in tasks if outcomes[task.label] is None]
    if missing:
        at_once = min(jobs or os.cpu_count() or 1, len(missing))
        pool = _Pool(cache, at_once, retries, timeout, observe)
        outcomes |= pool.run(sorted(missing, key=_rank))
    by_label = {task.label: task for task in tasks}
    done = tuple(
        _fitting(outcome, by_label[outcome.label], cache)
        for outcome in outcomes.values()
        if outcome is not None
    )
    return Report(done, time.perf_counter() - began)


def _fitting(outcome: Outcome, task: Task, cache: Cache) -> Outcome:
    """A program that its device cannot hold stays stored, for plans, but is a failure here."""
    if outcome.digest is None or not Target.parse(task.program.target).is_gpu:
        return outcome
    from graphtrain.fitting import check_fits

    artifact = cache.get(outcome.digest)
    try:
        if artifact is not None:
            check_fits(task.program, artifact.record)
    except OutOfMemory as error:
        return replace(outcome, status="failed", error=str(error), kind=type(error).__name__)
    return outcome


def _cached(task: Task, cache: Cache, observe: Observer) -> Outcome | None:
    began = time.perf_counter()
    digest = cache.program_of(task.request)
    if digest is None:
        observe(task.label, "queued")
        return None
    observe(task.label, "cached")
    return Outcome(task.label, "cached", round(time.perf_counter() - began, 3), digest)


def _refused(task: Task, cache: Cache, observe: Observer) -> Outcome | None:
    """What the same compiler said of the same graph before."""
    failure = cache.failure(task.request, task.label)
    if failure is None:
        return None
    observe(task.label, "failed before")
    kept = str(failure.directory)
    return Outcome(task.label, "failed", 0.0, None, failure.error, failure.kind, kept, attempts=0)


def _rank(task: Task) -> int:
    """Longest first, so that none is left to compile alone at the end."""
    known = task.graph in _LONGEST_FIRST
    return _LONGEST_FIRST.index(task.graph) if known else len(_LONGEST_FIRST)


@dataclass
class _Worker:
    """A running process and the graph it has."""

    task: Task
    process: Any
    pipe: Connection
    scratch: Path
    began: float
    attempt: int
    message: tuple[Any, ...] | None = None  # its last word
    is_late: bool = False


class _Pool:
    """One process for each graph, a bounded number at once."""

    def __init__(
        self, cache: Cache, jobs: int, retries: int, timeout: float | None, observe: Observer
    ) -> None:
        self._cache = cache
        self._jobs = jobs
        self._retries = retries
        self._timeout = timeout
        self._observe = observe
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["graphtrain.worker"])

    def run(self, tasks: Sequence[Task]) -> dict[str, Outcome]:
        queue = deque((task, 1) for task in tasks)
        running: list[_Worker] = []
        outcomes: dict[str, Outcome] = {}
        with _scratch_directory() as scratch, _stopped_at_exit(running):
            while queue or running:
                while queue and len(running) < self._jobs:
                    running.append(self._start(*queue.popleft(), scratch))
                for worker in self._finished(running):
                    running.remove(worker)
                    if self._is_worth_another(worker):
                        queue.append((worker.task, worker.attempt + 1))
                    else:
                        outcomes[worker.task.label] = self._outcome(worker)
        return outcomes

    def _start(self, task: Task, attempt: int, parent: Path) -> _Worker:
        scratch = Path(tempfile.mkdtemp(dir=parent))
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(
            target=_work,
            args=(task.program, task.graph, task.request, self._cache.root, scratch, theirs),
            daemon=True,
        )
        process.start()
        theirs.close()
        self._observe(task.label, "starting" if attempt == 1 else f"attempt {attempt}")
        return _Worker(task, process, ours, scratch, time.perf_counter(), attempt)

    def _finished(self, running: list[_Worker]) -> list[_Worker]:
        """Wait for news, take it in, and return the workers that have ended."""
        by_pipe = {worker.pipe: worker for worker in running}
        ended = []
        for ready in wait(list(by_pipe), self._stop_late(running)):
            worker = by_pipe[ready]  # type: ignore[index]
            try:
                message = worker.pipe.recv()
            except EOFError:
                worker.process.join()
                ended.append(worker)
                continue
            if message[0] == "stage":
                self._observe(worker.task.label, message[1])
            else:
                worker.message = message
        return ended

    def _stop_late(self, running: list[_Worker]) -> float | None:
        """Kill workers whose time is over; seconds until the next one's is."""
        if self._timeout is None:
            return None
        now = time.perf_counter()
        for worker in running:
            if now - worker.began > self._timeout and not worker.is_late:
                worker.is_late = True
                worker.process.kill()
        left = [self._timeout - (now - one.began) for one in running if not one.is_late]
        return max(0.0, min(left)) if left else None

    def _is_worth_another(self, worker: _Worker) -> bool:
        if worker.message is not None or worker.is_late or worker.attempt > self._retries:
            return False
        if worker.process.exitcode == -signal.SIGKILL:  # as the kernel ends what takes its memory
            self._jobs = max(1, self._jobs // 2)
        return True

    def _outcome(self, worker: _Worker) -> Outcome:
        seconds = round(time.perf_counter() - worker.began, 3)
        label, message = worker.task.label, worker.message
        if message is not None and message[0] == "done":
            status = "compiled" if message[2] else "cached"
            self._observe(label, status)
            return Outcome(label, status, seconds, message[1], attempts=worker.attempt)
        error, kind = message[1:] if message else (_ended(worker.process.exitcode), None)
        if worker.is_late:
            error, kind = f"not compiled within {self._timeout:g} s (--timeout)", "Timeout"
        kept = self._keep(worker, {"error": error, "kind": kind} if kind in _FINAL else {})
        self._observe(label, "failed")
        return Outcome(label, "failed", seconds, None, error, kind, kept, worker.attempt)

    def _keep(self, worker: _Worker, reason: dict[str, str]) -> str | None:
        """Store the StableHLO and log of a failure; the store itself may be what failed."""
        text, log = (_read(worker.scratch / name) for name in ("program.mlir", "log.txt"))
        task = worker.task
        try:
            kept = self._cache.store_failure(task.request, task.label, text, log, reason)
            return str(kept)
        except CacheError:
            return None


def _work(*arguments: Any) -> None:
    """Begin a worker; the name by which the forkserver's children find it."""
    from graphtrain.worker import work

    work(*arguments)


def _ended(code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        hint = "; the machine may be out of memory, try --jobs 1" if name == "SIGKILL" else ""
        return f"the compiler's process was ended by {name}{hint}"
    return f"the compiler's process ended with status {code} and said nothing"


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


@contextmanager
def _scratch_directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="graphtrain-compile-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _stopped_at_exit(running: list[_Worker]) -> Iterator[None]:
    """On Ctrl-C or a defect, leave no worker behind; the kernel frees their locks."""
    try:
        yield
    finally:
        for worker in running:
            worker.process.terminate()
            worker.process.join()
