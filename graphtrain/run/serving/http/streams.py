"""Server-sent events, and work that ends when its client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

from graphtrain.run.serving.http.errors import ApiError

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx passes on each event at once
]

Result = TypeVar("Result")


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result | None:
    """Return the result of `work`; None if the client leaves first, and `work` is cancelled."""
    task = asyncio.ensure_future(work)
    left = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for one in (task, left):
            one.cancel()
        await asyncio.gather(task, left, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream:
    """Answer that sends each object as a server-sent event, as they come.

    Args:
        objects: The objects; an ApiError from them is the last event.
        seconds: Time in which all must be sent.
        on_end: Called at the end, also if the client left.
    """

    def __init__(
        self, objects: AsyncIterator[Any], seconds: float, on_end: Callable[[], None]
    ) -> None:
        self._objects, self._seconds, self._on_end = objects, seconds, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._send_all(send))
        finally:
            self._on_end()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        try:
            async with asyncio.timeout(self._seconds):
                async for part in self._objects:
                    await _send_event(send, to_json(part))
        except ApiError as error:
            await _send_event(send, to_json(error.body()))
        except TimeoutError:
            await _send_event(send, to_json(took_too_long(self._seconds).body()))
        else:
            await _send_event(send, b"[DONE]")
        await send({"type": "http.response.body", "body": b""})


async def _send_event(send: Send, data: bytes) -> None:
    body = b"data: " + data + b"\n\n"
    await send({"type": "http.response.body", "body": body, "more_body": True})


def took_too_long(seconds: float) -> ApiError:
    """Return the error of an answer that is not complete in time."""
    return ApiError(504, f"the answer was not complete after {seconds:g} seconds", code="timeout")
