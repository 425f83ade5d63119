"""Pool of worker processes that compile the missing graphs, a limited number at once.

This process imports neither JAX nor the model. It holds the lease of every graph that it compiles.
Several pools, on any hosts that share the cache, therefore divide the graphs among them: a graph
whose lease another pool holds is deferred, and looked up in the cache later.
"""

import math
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from graphtrain.cache import Cache
from graphtrain.cache.sizes import format_size
from graphtrain.compile.forkserver import ForkServer, kill_worker, scratch_directory
from graphtrain.compile.tasks import Limits, Observer, Task, TaskOutcome
from graphtrain.errors import CacheError
from lowering.machine import host
from lowering.machine.leases import Lease

# Deterministic failures, which are stored. Others, such as full disks and kills, may not recur.
_DETERMINISTIC_ERRORS = ("OutOfMemory", "ShardingError")
_INTERRUPTED = "CompilerInterrupted"  # a compiler in a process of its own was killed
_WAITING = "waiting"  # prefix of stages in which a worker is idle
_POLL_SECONDS = 0.5  # seconds between attempts to acquire leases that other pools hold
_DEFAULT_WORKER_BYTES = 1 << 30  # assumed memory of a worker in bytes, until one has finished


@dataclass
class _Queued:
    """A graph that waits for a worker of this pool."""

    task: Task
    lease: Lease
    attempt: int = 1
    is_deferred: bool = False


@dataclass
class _Worker:
    """A running worker process and its graph."""

    queued: _Queued
    process: Any
    pipe: Connection
    scratch: Path
    began: float
    deadline: float
    message: tuple[Any, ...] | None = None  # its final message
    is_late: bool = False  # stopped because of the timeout

    @property
    def task(self) -> Task:
        return self.queued.task


class Pool:
    """Pool with one worker process for each graph, within limits of jobs and memory."""

    def __init__(
        self,
        cache: Cache,
        limits: Limits,
        known: Callable[[Task], TaskOutcome | None],
        observe: Observer,
    ) -> None:
        """Create a pool.

        Args:
            cache: cache for programs and failures.
            limits: limits on this host's resources.
            known: returns the outcome of a graph if the cache has it; called with its lease held.
            observe: called with the label and stage of each task.
        """
        self._cache = cache
        self._jobs = limits.jobs or host.usable_cores()
        self._memory = limits.memory or host.available_memory()
        self._timeout = limits.timeout or math.inf
        self._retries = limits.retries
        self._known = known
        self._observe = observe
        self._largest = _DEFAULT_WORKER_BYTES
        self._server = ForkServer()

    def run(self, tasks: Sequence[Task]) -> dict[str, TaskOutcome]:
        """Compile all graphs; return their outcomes by label."""
        queue = [_Queued(task, self._cache.lease(task.request)) for task in tasks]
        running: list[_Worker] = []
        outcomes: dict[str, TaskOutcome] = {}
        with scratch_directory() as scratch, _stopped_at_exit(running):
            while queue or running:
                self._begin(queue, running, outcomes, scratch)
                for worker in self._finished(running, is_more=bool(queue)):
                    running.remove(worker)
                    if self._is_worth_another(worker):
                        queue.append(_retry(worker.queued))
                    else:
                        outcomes[worker.task.label] = self._outcome(worker)
                    worker.queued.lease.release()
        return outcomes

    def _begin(
        self,
        queue: list[_Queued],
        running: list[_Worker],
        outcomes: dict[str, TaskOutcome],
        scratch: Path,
    ) -> None:
        """Start workers for graphs whose lease is free, while jobs and memory allow."""
        for queued in tuple(queue):
            if len(running) >= self._jobs or not self._has_room(running):
                return
            label = queued.task.label
            if not queued.lease.try_acquire():
                if not queued.is_deferred:
                    self._observe(label, f"{_WAITING} for {queued.lease.owner()}")
                queued.is_deferred = True
                continue
            queue.remove(queued)
            outcome = self._known(queued.task)
            if outcome is None:
                running.append(self._start(queued, scratch))
            else:
                outcomes[label] = outcome
                queued.lease.release()

    def _has_room(self, running: Sequence[_Worker]) -> bool:
        """Return whether memory suffices for another worker as large as the largest so far."""
        used_bytes = sum(max(_resident(worker.process.pid), self._largest) for worker in running)
        return not running or used_bytes + self._largest <= self._memory

    def _start(self, queued: _Queued, parent: Path) -> _Worker:
        task = queued.task
        scratch = Path(tempfile.mkdtemp(dir=parent))
        process, receiver = self._server.start(
            task.program, task.graph, task.request, task.configuration, self._cache.root, scratch
        )
        self._observe(
            task.label, "starting" if queued.attempt == 1 else f"attempt {queued.attempt}"
        )
        now = time.perf_counter()
        return _Worker(queued, process, receiver, scratch, now, now + self._timeout)

    def _finished(self, running: list[_Worker], is_more: bool) -> list[_Worker]:
        """Wait for messages, process them, and return the workers that have ended."""
        by_pipe = {worker.pipe: worker for worker in running}
        pause = min(self._stop_late(running), _POLL_SECONDS if is_more else math.inf)
        if not running:
            time.sleep(pause if is_more else 0)
            return []
        ended = []
        for ready in wait(list(by_pipe), None if pause == math.inf else pause):
            worker = by_pipe[ready]  # type: ignore[index]
            try:
                message = worker.pipe.recv()
            except EOFError:
                kill_worker(worker.process)
                ended.append(worker)
                continue
            if message[0] == "stage":
                self._note_stage(worker, message[1])
            else:
                worker.message = message
                self._largest = max(self._largest, message[-1])
        return ended

    def _note_stage(self, worker: _Worker, stage: str) -> None:
        """Report a stage; suspend the timeout while the worker waits for another process."""
        self._observe(worker.task.label, stage)
        if stage.startswith(_WAITING):
            worker.deadline = math.inf
        elif worker.deadline == math.inf:
            worker.deadline = time.perf_counter() + self._timeout

    def _stop_late(self, running: list[_Worker]) -> float:
        """Kill workers past their deadline; return the seconds until the next deadline."""
        now = time.perf_counter()
        for worker in running:
            if now > worker.deadline and not worker.is_late:
                worker.is_late = True
                kill_worker(worker.process)
        return max(0.0, min((w.deadline - now for w in running if not w.is_late), default=math.inf))

    def _is_worth_another(self, worker: _Worker) -> bool:
        attempts = worker.queued.attempt
        compiler_killed = worker.message is not None and worker.message[2] == _INTERRUPTED
        ended = worker.message is not None and not compiler_killed
        if ended or worker.is_late or attempts > self._retries:
            return False
        # The kernel's out-of-memory killer uses SIGKILL, so run fewer workers at once.
        if compiler_killed or worker.process.exitcode == -signal.SIGKILL:
            self._jobs = max(1, self._jobs // 2)
        return True

    def _outcome(self, worker: _Worker) -> TaskOutcome:
        seconds = round(time.perf_counter() - worker.began, 3)
        label, message, attempt = worker.task.label, worker.message, worker.queued.attempt
        peak = message[-1] if message else None
        if message is not None and message[0] == "done":
            status = "compiled" if message[2] else "cached"
            self._observe(label, status)
            return TaskOutcome(
                label, status, seconds, message[1], attempts=attempt, peak_bytes=peak
            )
        if message is not None and message[0] == "bundled":
            error, bundle, preflight = message[1:4]
            self._observe(label, "bundled")
            return TaskOutcome(
                label, "bundled", seconds, error=error, kind="CompilerMissing", attempts=attempt,
                peak_bytes=peak, bundle=bundle, preflight=preflight,
            )  # fmt: skip
        error, kind = message[1:3] if message else (self._ended(worker.process.exitcode), None)
        if worker.is_late:
            error, kind = f"not compiled within {self._timeout:g} s (--timeout)", "Timeout"
        failure_directory = self._keep(
            worker, {"error": error, "kind": kind} if kind in _DETERMINISTIC_ERRORS else {}
        )
        self._observe(label, "failed")
        return TaskOutcome(
            label, "failed", seconds, None, error, kind, failure_directory, attempt, peak
        )

    def _ended(self, code: int | None) -> str:
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            hint = (
                f"; the machine may be out of memory ({format_size(self._memory)} were available "
                "at the start); try --jobs 1"
            )
            return f"the compiler process was killed by {name}{hint if name == 'SIGKILL' else ''}"
        return f"the compiler process exited with status {code} without an error message"

    def _keep(self, worker: _Worker, reason: dict[str, str]) -> str | None:
        """Store the StableHLO and log of a failure; return None if the cache cannot be written."""
        text, log = (_read(worker.scratch / name) for name in ("program.mlir", "log.txt"))
        task = worker.task
        try:
            # Stored by graph, not by label, since labels differ between commands.
            directory = self._cache.store_failure(task.request, task.graph, text, log, reason)
            return str(directory)
        except CacheError:
            return None


def _retry(queued: _Queued) -> _Queued:
    return _Queued(queued.task, queued.lease, queued.attempt + 1)


def _resident(pid: int) -> int:
    """Return the resident bytes of a process and its children; 0 once it has ended."""
    import psutil

    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
        return sum(member.memory_info().rss for member in family)
    except psutil.NoSuchProcess:
        return 0


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


@contextmanager
def _stopped_at_exit(running: list[_Worker]) -> Iterator[None]:
    """Stop all workers and release their leases at exit, also on Ctrl-C and unexpected errors."""
    try:
        yield
    finally:
        for worker in running:
            kill_worker(worker.process)
            worker.queued.lease.release()
