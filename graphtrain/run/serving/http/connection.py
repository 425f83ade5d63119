"""HTTP connections with limits of time, which uvicorn has only between requests."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

_HEADER_SECONDS = 15.0  # from the first byte, or the connection, to the end of the headers
_STALL_SECONDS = 30.0  # in which a client that falls behind must read what is buffered


class TimedConnection(H11Protocol):
    """Connection that ends if its client sends headers, or reads an answer, too slowly."""

    _header_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._time_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._time_headers()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall_timer = self.loop.call_later(_STALL_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        _cancel(self._stall_timer)

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._header_timer)
        _cancel(self._stall_timer)
        super().connection_lost(exc)

    def _time_headers(self) -> None:
        """Start or stop the time in which headers must arrive."""
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if is_answering:
            _cancel(self._header_timer)
            self._header_timer = None
        elif self._header_timer is None:
            self._header_timer = self.loop.call_later(_HEADER_SECONDS, self._end_headers)

    def _end_headers(self) -> None:
        self._header_timer = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
