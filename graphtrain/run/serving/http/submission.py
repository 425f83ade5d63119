"""A request at the engine: its progress as an asynchronous iterator, and its result."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from graphtrain.run.serving.engine_protocol import TokenChoice
from graphtrain.run.serving.http.errors import ApiError
from graphtrain.run.serving.http.prepare import Prepared
from graphtrain.run.serving.scheduler import Job
from graphtrain.run.serving.sequence import FinishReason, TextToken, Update, Usage
from graphtrain.run.serving.worker import NotReady, QueueFull, TooManySequences, Worker
from sharding_rules.errors import UserError

_REASONS = {
    "loading": "the model is being loaded; try again in a moment",
    "draining": "the server is shutting down",
    "stopped": "the server is shutting down",
}


@dataclass
class Sequence:
    """Result of one sequence so far."""

    text: str = ""
    tokens: list[TextToken] = field(default_factory=list)
    stop_token: TextToken | None = None
    scores: tuple[TokenChoice | None, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None

    def add(self, update: Update) -> None:
        self.text += update.text
        self.tokens += update.tokens
        self.scores, self.finish_reason = update.scores, update.finish_reason
        self.stop_token, self.usage = update.stop_token, update.usage


class Submission:
    """A request that was submitted to a worker, and is cancelled if it is not finished.

    Args:
        worker: Thread of the engine.
        prepared: The sequences.
        observe: Called with the usage of each sequence that ended.

    Raises:
        ApiError: the worker takes no requests now.
    """

    def __init__(
        self, worker: Worker, prepared: Prepared, observe: Callable[[Usage], None]
    ) -> None:
        self._worker, self._observe = worker, observe
        self._loop = asyncio.get_running_loop()
        self._updates: asyncio.Queue[list[Update]] = asyncio.Queue()
        self._job = Job(prepared.requests, self._deliver)
        self._remaining = len(prepared.requests)
        self.sequences = [Sequence() for _ in prepared.requests]
        try:
            if self._remaining:
                worker.submit(self._job)
        except NotReady as error:
            raise _not_ready(error) from None
        except TooManySequences as error:
            raise ApiError(400, f"{error}; send several requests") from None
        except QueueFull as error:
            raise ApiError(429, f"the server is busy: {error}; try again later") from None

    def _deliver(self, updates: list[Update]) -> None:
        with contextlib.suppress(RuntimeError):  # the server stopped, and its loop is closed
            self._loop.call_soon_threadsafe(self._updates.put_nowait, updates)

    async def updates(self) -> AsyncIterator[Update]:
        """Yield the progress of the sequences until all ended.

        Raises:
            ApiError: a sequence failed.
        """
        while self._remaining:
            for update in await self._updates.get():
                if update.error is not None:
                    raise _failure(update.error)
                if update.usage is not None:
                    self.sequences[update.index].usage = update.usage
                    self._observe(update.usage)
                    self._remaining -= 1
                yield update

    async def finish(self) -> list[Sequence]:
        """Wait until all sequences ended; their updates are kept, as those of a stream are not."""
        async for update in self.updates():
            self.sequences[update.index].add(update)
        return self.sequences

    def cancel(self) -> None:
        """End the sequences that are not finished."""
        if self._remaining:
            self._worker.cancel(self._job)


def _not_ready(error: NotReady) -> ApiError:
    status = str(error)
    if status in _REASONS:
        return ApiError(503, _REASONS[status], code=status)
    return ApiError(500, "the model failed; see the log of the server", code=status)


def _failure(error: Exception) -> ApiError:
    if isinstance(error, NotReady):
        return _not_ready(error)
    assert isinstance(error, UserError), error
    return ApiError(500, str(error))
