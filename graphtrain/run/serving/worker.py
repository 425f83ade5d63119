"""Thread of an engine: opens it, and runs its scheduler as long as there is something to do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from graphtrain.data.tokenizers.protocol import Tokenizer
from graphtrain.run.serving.chat_format import ChatFormat
from graphtrain.run.serving.engine_protocol import Engine
from graphtrain.run.serving.scheduler import Job, Scheduler, Statistics
from graphtrain.run.serving.sequence import Update
from lowering.machine import startup

Status = Literal["loading", "ready", "draining", "stopped", "failed"]


@dataclass(frozen=True)
class OpenedModel:
    """Model that is ready to generate, with what turns text into its tokens and back."""

    engine: Engine
    tokenizer: Tokenizer
    prefix: tuple[int, ...]  # tokens that begin a prompt
    chat: ChatFormat | None  # None: there is no chat template
    # What can wait until the model is idle, in short steps: loading the other programs.
    finish: Callable[[], Iterator[object]] = lambda: iter(())


class NotReady(Exception):
    """The worker takes no requests now: it is loading, draining, stopped or failed."""


class QueueFull(Exception):
    """The limit of sequences that wait is reached."""


class TooManySequences(Exception):
    """A request has more sequences than ever find a place."""


class Worker:
    """The only thread that calls an engine. Its methods may be called from any thread.

    Args:
        open_model: Opens the model, in the thread of the worker.
        max_queue: Number of sequences that may wait for a slot.
        on_end: Called in the thread of the worker when it ends, for whatever reason.
        on_ready: Called in the thread of the worker when it takes requests.
    """

    def __init__(
        self,
        open_model: Callable[[], OpenedModel],
        max_queue: int,
        on_end: Callable[[], None] = lambda: None,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        self._open, self._max_queue = open_model, max_queue
        self._on_end, self._on_ready = on_end, on_ready
        self._changed = threading.Condition()
        self._submitted: list[Job] = []
        self._cancelled: list[Job] = []
        self._unfinished: dict[Job, int] = {}  # sequences of each request that did not end
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._is_stopped = False
        self.status: Status = "loading"
        self.error: BaseException | None = None  # why it failed
        self.model: OpenedModel | None = None
        self.statistics = Statistics()

    def start(self) -> None:
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue the sequences of a request.

        Raises:
            NotReady: no requests are taken now.
            QueueFull: too many sequences wait.
            TooManySequences: the request is too large also when none wait.
        """
        with self._changed:
            if self.status != "ready":
                raise NotReady(self.status)
            assert self.model is not None, "a worker that is ready has a model"
            count, most = len(job.requests), self._max_queue + self.model.engine.slots
            if count > most:
                raise TooManySequences(
                    f"the request has {count:,} sequences (prompts, times n or best_of); this "
                    f"server takes at most {most:,} at a time"
                )
            waiting = self.statistics.waiting + sum(len(one.requests) for one in self._submitted)
            if waiting + count > self._max_queue + self._free_slots():
                raise QueueFull(f"{waiting} sequences wait")
            self._submitted.append(job)
            self._unfinished[job] = count
            self._changed.notify_all()

    def cancel(self, job: Job) -> None:
        """End the sequences of a request, if they did not end before."""
        with self._changed:
            if self._unfinished.pop(job, None) is not None:
                self._cancelled.append(job)
                self._changed.notify_all()

    def opened(self) -> OpenedModel:
        """Return the model, once it is open.

        Raises:
            BaseException: what prevented it.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.status != "loading")
        if self.error is not None:
            raise self.error
        assert self.model is not None
        return self.model

    def drain(self) -> None:
        """Take no new requests; the worker ends when all that it has taken are finished."""
        with self._changed:
            if self.status in ("ready", "loading"):
                self.status = "draining"
            self._changed.notify_all()

    def stop(self) -> None:
        """End after the current step, whatever is unfinished."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
        self.drain()

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the end of the thread; return whether it ended."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _free_slots(self) -> int:
        if self.model is None:
            return 0
        busy = self.statistics.prefilling + self.statistics.active
        return self.model.engine.slots - busy

    def _work(self) -> None:
        try:
            model = self._open()
            startup.resume_garbage_collection()
            scheduler = Scheduler(model.engine, model.tokenizer.decode)
            with self._changed:
                self.model, self.statistics = model, scheduler.statistics
                is_ready = self.status == "loading"  # not if it is to end already
                if is_ready:
                    self.status = "ready"
                self._changed.notify_all()
            if is_ready:
                self._on_ready()
            self._serve(model, scheduler)
            self.status = "stopped"
        except BaseException as error:  # the thread that waits for the end raises it
            self.error, self.status = error, "failed"
        finally:
            with self._changed:
                self._changed.notify_all()
            self._end_unfinished()
            self._on_end()

    def _serve(self, model: OpenedModel, scheduler: Scheduler) -> None:
        """Run the scheduler; while there is nothing to generate, finish opening the model.

        So a program that cannot be loaded ends the server at its start, not at the first request.
        """
        rest, is_finishing, end = model.finish(), True, object()
        while self._wait_for_work(scheduler, may_wait=not is_finishing):
            if scheduler.is_idle:
                is_finishing = next(rest, end) is not end
                continue
            for job, updates in scheduler.step().items():
                self._deliver(job, updates)

    def _wait_for_work(self, scheduler: Scheduler, *, may_wait: bool) -> bool:
        """Pass on what was submitted and cancelled; return whether to go on."""
        with self._changed:
            while True:
                for job in self._submitted:
                    if job in self._unfinished:
                        scheduler.submit(job)
                for job in self._cancelled:
                    scheduler.cancel(job)
                self._submitted.clear()
                self._cancelled.clear()
                if self._is_stopped:
                    return False
                if not scheduler.is_idle:
                    return True
                if self.status != "draining" and not may_wait:
                    return True
                if self.status == "draining":
                    return False
                self._changed.wait()

    def _deliver(self, job: Job, updates: list[Update]) -> None:
        with self._changed:
            if job not in self._unfinished:  # cancelled
                return
            self._unfinished[job] -= sum(update.is_last for update in updates)
            if not self._unfinished[job]:
                del self._unfinished[job]
        job.deliver(updates)

    def _end_unfinished(self) -> None:
        with self._changed:
            jobs = list(self._unfinished)
            self._unfinished.clear()
        for job in jobs:
            job.deliver([Update(index=0, error=NotReady(self.status))])
