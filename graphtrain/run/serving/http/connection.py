"""HTTP connections with limits of time, which uvicorn has only between requests."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

_HEADER_SECONDS = 15.0  # from the first byte, or the connection, to the end of the headers
_STALL_SECONDS = 30.0  # in which a client that falls behind must read what is buffered
_DISCARD_SECONDS = 5.0  # in which a client may go on sending a body that was refused


class TimedConnection(H11Protocol):
    """Connection that ends if its client sends headers, or reads an answer, too slowly."""

    _header_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(_AnsweringTransport(transport, self))  # type: ignore[arg-type]
        self._time_headers()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return  # the rest of a refused body
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


class _AnsweringTransport:
    """Transport whose client can read an answer that ends the connection before its body does.

    If a socket is closed while bytes of its client are unread, the system resets the connection,
    and the client may lose the answer. So close() ends the answer alone, and discards what the
    client still sends, for a few seconds.
    """

    def __init__(self, transport: asyncio.Transport, connection: H11Protocol) -> None:
        self._transport, self._connection = transport, connection
        self._timer: asyncio.TimerHandle | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self._timer is not None or self._transport.is_closing()

    def close(self) -> None:
        sends_body = self._connection.conn.their_state is h11.SEND_BODY
        if self.is_closing() or not sends_body or not self._transport.can_write_eof():
            _cancel(self._timer)
            self._transport.close()
            return
        self._timer = self._connection.loop.call_later(_DISCARD_SECONDS, self._transport.abort)
        self._transport.write_eof()
        self._transport.resume_reading()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
