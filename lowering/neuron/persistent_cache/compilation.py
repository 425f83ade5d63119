"""Compilation of unfinished cache entries in parallel, each completed in its directory.

One thread starts the compilers, polls them and touches their locks.
"""

import os
import shutil
import signal
import subprocess
import tempfile
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from lowering.errors import LoweringError
from lowering.machine import host
from lowering.neuron.compiler import (
    Compiler,
    arguments,
    environment,
    kill_with_parent_prefix,
)
from lowering.neuron.compiler_flags import without_wrapper_flags
from lowering.neuron.persistent_cache import completion, entries, flags, locks
from lowering.neuron.persistent_cache.entries import NeuronCacheEntry
from lowering.neuron.persistent_cache.failures import CompileFailure, classify

_MEMORY_PER_COMPILER = 64 << 30  # bytes of host memory for one compiler, as AWS's tool estimates
_HEARTBEAT = 60  # seconds between touches of a lock
_POLL_SECONDS, _LOCK_POLL_SECONDS = (
    0.05,
    1.0,
)  # seconds between polls of compilers, and of another process's lock
_SCRATCH = "graphtrain-neuron-cache-"

# Runs the compiler in its own process group, which is killed however this process ends.
_GROUP = ["sh", "-c", 'trap "kill -KILL 0" TERM; "$@" & wait $!', "sh"]

Observer = Callable[[str, str], None]  # name of an entry, progress message


@dataclass(frozen=True)
class CompileOptions:
    """Options for compiling entries."""

    jobs: int | None = None  # compilers in parallel; None: as memory and cores allow
    retries: int = 1  # further attempts after a failure that may be transient
    timeout: float | None = None  # seconds for each attempt
    retry_failed: bool = False  # also compile programs that the compiler has rejected before
    wait: bool = False  # wait for locked entries instead of skipping them
    target: str | None = None  # --target for entries whose flags name none
    stale_after: float = 6 * 3600  # seconds after which locks of other tools are stale


@dataclass(frozen=True)
class EntryOutcome:
    """Result for one entry."""

    program: Path
    status: Literal["compiled", "failed", "locked"]
    attempts: int  # 0: known without compiling, or left to another process
    seconds: float
    failure: CompileFailure | None = None


@dataclass
class _Running:
    entry: NeuronCacheEntry
    attempt: int
    process: subprocess.Popen
    lock: locks.HeldLock
    scratch: Path
    log: IO[bytes]
    began: float
    touched: float
    timed_out: bool = False


def default_jobs() -> int:
    """Return the number of compilers that available memory and cores allow."""
    return max(1, min(host.usable_cores(), -(-host.available_memory() // _MEMORY_PER_COMPILER)))


def compile_entries(
    unfinished: Sequence[NeuronCacheEntry],
    root: Path,
    compiler: Compiler,
    settings: CompileOptions,
    observe: Observer = lambda name, stage: None,
) -> list[EntryOutcome]:
    """Compile entries of this compiler's directory, the largest program first.

    Entries that another process is compiling are skipped, unless settings.wait is true.

    Raises:
        LoweringError: the cache is not writable.
    """
    _remove_stale_scratch()
    with tempfile.TemporaryDirectory(prefix=f"{_SCRATCH}{os.getpid()}-") as scratch:
        pool = _CompilerPool(root, compiler, settings, observe, Path(scratch))
        return pool.run(sorted(unfinished, key=_size, reverse=True))


class _CompilerPool:
    def __init__(
        self,
        root: Path,
        compiler: Compiler,
        settings: CompileOptions,
        observe: Observer,
        scratch: Path,
    ) -> None:
        self._root, self._compiler, self._settings = root, compiler, settings
        self._observe, self._scratch = observe, scratch
        self._jobs = settings.jobs or default_jobs()
        self._queue: deque[tuple[NeuronCacheEntry, int, float]] = (
            deque()
        )  # entry, attempt, earliest start
        self._running: list[_Running] = []
        self._outcomes: list[EntryOutcome] = []
        self._waited_for: set[Path] = set()

    def run(self, unfinished: Sequence[NeuronCacheEntry]) -> list[EntryOutcome]:
        self._queue.extend((entry, 1, 0.0) for entry in unfinished)
        try:
            while self._queue or self._running:
                self._fill()
                self._watch()
                time.sleep(_POLL_SECONDS if self._queue or self._running else 0)
        finally:
            for job in self._running:
                self._clean_up(job)
        return self._outcomes

    def _fill(self) -> None:
        for _ in range(len(self._queue)):
            if len(self._running) >= self._jobs:
                return
            entry, attempt, not_before = self._queue.popleft()
            if time.monotonic() < not_before:
                self._queue.append((entry, attempt, not_before))
            else:
                self._try_start(entry, attempt)

    def _try_start(self, entry: NeuronCacheEntry, attempt: int) -> None:
        """Start a compiler, unless the entry is locked by another process or finished."""
        program = entry.program
        assert program is not None, "only what has a program is queued"
        lock_path = program.with_name(program.name + locks.SUFFIX)
        lock = locks.acquire(lock_path, self._root, locks.LockChecker(self._settings.stale_after))
        if isinstance(lock, locks.Lock):
            self._skip_locked(entry, attempt, lock)
            return
        try:
            current = entries.read(entry.directory, judge=None)
            outcome = self._known_outcome(current, program)
            if outcome is None:
                self._running.append(self._start(current, attempt, lock))  # owns the lock now
        except (LoweringError, OSError, EOFError, zlib.error) as error:
            outcome = EntryOutcome(
                program, "failed", 0, 0.0, CompileFailure("not started", str(error))
            )
        except BaseException:
            lock.release()
            raise
        if outcome is None:
            self._observe(entry.directory.name, f"compiling, attempt {attempt}")
            return
        lock.release()
        self._report(outcome)

    def _known_outcome(self, current: NeuronCacheEntry, program: Path) -> EntryOutcome | None:
        """Return the outcome if the entry was compiled since it was queued, or rejected before."""
        if current.state == "done":
            return EntryOutcome(program, "compiled", 0, 0.0)
        if current.failure and current.failure.is_final and not self._settings.retry_failed:
            return EntryOutcome(program, "failed", 0, 0.0, current.failure)
        return None

    def _skip_locked(self, entry: NeuronCacheEntry, attempt: int, lock: locks.Lock) -> None:
        if self._settings.wait:
            self._queue.append((entry, attempt, time.monotonic() + _LOCK_POLL_SECONDS))
            if entry.directory not in self._waited_for:
                self._waited_for.add(entry.directory)
                self._observe(entry.directory.name, f"waiting for {lock.owner}")
            return
        assert entry.program is not None
        self._observe(entry.directory.name, f"skipped, locked by {lock.owner}")
        self._outcomes.append(EntryOutcome(entry.program, "locked", 0, 0.0))

    def _start(self, entry: NeuronCacheEntry, attempt: int, lock: locks.HeldLock) -> _Running:
        """Start the compiler with the flags of the entry.

        Raises:
            LoweringError: the entry has no flags, or they contain no --target.
        """
        assert entry.program is not None
        entry_flags = flags.read(entry.directory)
        if not flags.match_key(entry.directory.name, entry_flags):
            self._observe(entry.directory.name, "its flags do not match the flags key in its name")
        compile_flags = without_wrapper_flags(entry_flags)
        if flags.target_flag(compile_flags) is None:
            if self._settings.target is None:
                raise LoweringError("its flags contain no --target; pass one with --target")
            compile_flags = [f"--target={self._settings.target}", *compile_flags]
        scratch = Path(tempfile.mkdtemp(dir=self._scratch))
        program = completion.decompress_program(entry.program, scratch)
        command = [*self._compiler.command, *arguments(str(program), entries.NEFF, compile_flags)]
        log = (scratch / "log.txt").open("w+b")
        try:
            process = subprocess.Popen(
                [*kill_with_parent_prefix(), *_GROUP, *command, "--verbose=35"],
                cwd=scratch,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except BaseException:  # for example too many processes
            log.close()
            raise
        now = time.monotonic()
        return _Running(entry, attempt, process, lock, scratch, log, now, now)

    def _watch(self) -> None:
        """Handle compilers that have ended, kill those past the timeout, touch the other locks."""
        now = time.monotonic()
        for job in list(self._running):
            status = job.process.poll()
            if status is not None:
                self._running.remove(job)
                self._finish(job, status)
                continue
            if self._settings.timeout is not None and now - job.began > self._settings.timeout:
                job.timed_out = True
                _kill(job.process)
            if now - job.touched > _HEARTBEAT:
                job.lock.touch()
                job.touched = now

    def _finish(self, job: _Running, status: int) -> None:
        """Complete an entry, or record in it why compiling failed; then release it."""
        seconds = time.monotonic() - job.began
        try:
            failure = self._store_result(job, status)
        finally:
            self._clean_up(job)
        program = job.entry.program
        assert program is not None
        if failure is None:
            self._report(EntryOutcome(program, "compiled", job.attempt, seconds))
        elif failure.is_chance and job.attempt <= self._settings.retries:
            if failure.kind in ("killed", "out of memory"):
                self._jobs = max(1, self._jobs // 2)
            self._observe(job.entry.directory.name, f"{failure.kind}, will retry")
            self._queue.append((job.entry, job.attempt + 1, 0.0))
        else:
            self._report(EntryOutcome(program, "failed", job.attempt, seconds, failure))

    def _store_result(self, job: _Running, status: int) -> CompileFailure | None:
        directory, neff_path = job.entry.directory, job.scratch / entries.NEFF
        try:
            if status == 0 and neff_path.exists():
                completion.complete(directory, neff_path)
                return None
            failure = self._failure(job, status)
            completion.fail(directory, Path(job.log.name), failure)
        except (LoweringError, OSError) as error:
            return CompileFailure("not stored", str(error))
        return failure

    def _failure(self, job: _Running, status: int) -> CompileFailure:
        if job.timed_out:
            return CompileFailure("timed out", f"not compiled within {self._settings.timeout:g} s")
        if status == 0:
            return CompileFailure(
                "crashed", f"neuronx-cc exited with 0, but wrote no {entries.NEFF}"
            )
        job.log.seek(0)
        return classify(status, job.log.read().decode(errors="replace"))

    def _clean_up(self, job: _Running) -> None:
        """Remove the process, its scratch directory and its lock."""
        _kill(job.process)
        job.process.wait()
        job.log.close()
        shutil.rmtree(job.scratch, ignore_errors=True)
        job.lock.release()

    def _report(self, outcome: EntryOutcome) -> None:
        detail = f": {outcome.failure.kind}" if outcome.failure else ""
        self._observe(outcome.program.parent.name, outcome.status + detail)
        self._outcomes.append(outcome)


def _size(entry: NeuronCacheEntry) -> int:
    """Return the size of the program in bytes; large ones take longest and start first."""
    return entry.files[entry.program.name] if entry.program else 0


def _kill(process: subprocess.Popen) -> None:
    """Kill a compiler and its child processes."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _remove_stale_scratch() -> None:
    """Remove the scratch directories of killed runs, which may occupy gigabytes."""
    for path in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*"):
        owner = path.name.removeprefix(_SCRATCH).partition("-")[0]
        if owner.isdecimal() and not Path("/proc", owner).exists():
            shutil.rmtree(path, ignore_errors=True)
