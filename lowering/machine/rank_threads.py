"""Ranks of this process that are threads, one for each device: as of Neuron cores.

A thread is blocked while its device computes, and the collectives of a program synchronize all of
them. A watchdog asks here which ranks have not returned.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from queue import SimpleQueue
from typing import Any, TypeVar

from lowering.errors import LoweringError

T = TypeVar("T")


class RankThreads:
    """Threads that call a function for every rank at the same time."""

    def __init__(self, count: int) -> None:
        """Start `count` threads, for which the end of this process does not wait."""
        self._queues = [
            SimpleQueue[tuple[Future[Any], Callable[[int], Any]]]() for _ in range(count)
        ]
        self._calls: list[Future[Any]] = []
        for rank, queue in enumerate(self._queues):
            name = f"rank-{rank}"
            threading.Thread(target=_work, args=(rank, queue), name=name, daemon=True).start()

    def call(self, fn: Callable[[int], T]) -> list[T]:
        """Call a function with every rank; return the results by rank.

        Raises:
            LoweringError: a call failed. It is raised at once, although other ranks may wait for
                the one that failed, and names it.
        """
        self._calls = [Future() for _ in self._queues]
        for queue, call in zip(self._queues, self._calls, strict=True):
            queue.put((call, fn))
        _calling.append(self)
        try:
            wait(self._calls, return_when=FIRST_EXCEPTION)
            for rank, call in enumerate(self._calls):
                error = call.exception() if call.done() else None
                if isinstance(error, LoweringError):
                    raise LoweringError(f"rank {rank}: {error}") from error
                if error is not None:
                    raise error
            return [call.result() for call in self._calls]
        finally:
            _calling.remove(self)

    def waiting(self) -> list[int]:
        """Return the ranks that have not returned from the current call."""
        return [rank for rank, call in enumerate(self._calls) if not call.done()]

    @property
    def count(self) -> int:
        return len(self._queues)


_calling: list[RankThreads] = []  # those that are in a call


def _work(rank: int, queue: SimpleQueue[tuple[Future[Any], Callable[[int], Any]]]) -> None:
    while True:
        call, fn = queue.get()
        try:
            call.set_result(fn(rank))
        except BaseException as error:
            call.set_exception(error)
        del call, fn  # they would live until the next call


def describe_waiting() -> str:
    """Describe the ranks of this process that have not returned; empty if no device computes."""
    for threads in list(_calling):
        ranks = threads.waiting()
        if len(ranks) == threads.count > 1:
            return f"none of the {threads.count} ranks of this process has returned from its device"
        if ranks and threads.count > 1:
            noun, verb = ("rank", "has") if len(ranks) == 1 else ("ranks", "have")
            names = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
            return f"{noun} {names} {verb} not returned from the device, the others have"
    return ""
