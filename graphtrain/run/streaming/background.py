"""Threads that fetch from object stores, for as long as the process lives.

They are daemons: a request that hangs does not keep a process from ending.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache

_THREADS = 16  # requests at a time, which hide the latency of a store


class Background:
    """Queue of actions and the threads that carry them out, in order of submission."""

    def __init__(self, threads: int) -> None:
        self._actions: queue.SimpleQueue[tuple[Future[bytes], Callable[[], bytes]]] = (
            queue.SimpleQueue()
        )
        for number in range(threads):
            name = f"data stream {number}"
            threading.Thread(target=self._work, name=name, daemon=True).start()

    def submit(self, action: Callable[[], bytes]) -> Future[bytes]:
        """Return the future of an action."""
        future: Future[bytes] = Future()
        self._actions.put((future, action))
        return future

    def _work(self) -> None:
        while True:
            future, action = self._actions.get()
            try:
                future.set_result(action())
            except Exception as error:
                future.set_exception(error)
            del future, action  # which hold a block while this thread waits


@cache
def background() -> Background:
    """Return the threads of this process, which begin with the first call."""
    return Background(_THREADS)
