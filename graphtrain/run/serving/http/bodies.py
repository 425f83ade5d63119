"""Limits on the bodies of requests: on each, and on all that are held at the same time."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from graphtrain.run.serving.http.errors import ApiError

_BODY_SECONDS = 60.0


class BodyLimit:
    """Application that refuses requests while those that are read or answered hold too many bytes.

    What a body was parsed into lives as long as its answer, so bytes count until that ends.

    Args:
        app: Application behind it.
        total: Bytes of all bodies.
    """

    def __init__(self, app: ASGIApp, total: int) -> None:
        self._app, self._total = app, total
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        held = 0

        async def counted() -> Message:
            nonlocal held
            message = await receive()
            size = len(message.get("body", b""))
            if self._held + size > self._total:
                raise ApiError(
                    503,
                    f"the server is busy: the requests that it holds have {self._held} bytes; at "
                    f"most {self._total} are allowed; try again later",
                    code="busy",
                )
            held += size
            self._held += size
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            self._held -= held


async def read_body(request: Request, limit: int) -> bytes:
    """Return the body of a request.

    Raises:
        ApiError: it has more than `limit` bytes, or takes too long.
    """
    too_large = ApiError(413, f"the body is larger than {limit} bytes", code="request_too_large")
    length = request.headers.get("content-length", "0")
    if not length.isdigit() or int(length) > limit:
        raise too_large
    parts, size = [], 0
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise too_large
                parts.append(part)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive in {_BODY_SECONDS:.0f} seconds") from None
    return b"".join(parts)
