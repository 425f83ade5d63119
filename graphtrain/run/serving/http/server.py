"""A server from its first port to its last answer: load, serve, drain."""

from __future__ import annotations

import asyncio
import resource
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from graphtrain.run.serving.http.listener import bind, make_server, url_of
from graphtrain.run.serving.worker import OpenedModel, Worker
from lowering.machine.extras import is_installed, missing_extra

_MAX_CONNECTIONS = 1000
_KEEP_ALIVE_SECONDS = 30
_LAST_BYTES_SECONDS = 5  # for clients to read the ends of their answers


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Address of a server, and its limits."""

    model_name: str
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any that is free
    max_queue: int = 1000  # sequences that wait for a slot
    max_body: int = 8_000_000  # bytes of a request
    request_seconds: float = 600.0
    drain_seconds: float = 60.0  # for running requests after SIGTERM
    api_key: str | None = None


def serve(
    open_model: Callable[[], OpenedModel], settings: ServerSettings, log: Callable[[str], None]
) -> None:
    """Serve a model until SIGTERM or Ctrl-C; then finish what runs.

    The model is opened in the thread of its engine while the port is bound; until it is ready,
    requests are answered with status 503, and no address is logged.

    Args:
        open_model: Opens the model.
        settings: Address and limits.
        log: Called with what happens.

    Raises:
        MissingExtra: a package of the extra `serve` is not installed.
        UserError: the model cannot be opened, or the port cannot be used.
    """
    for module in ("prometheus_client", "starlette", "uvicorn"):
        if not is_installed(module):
            raise missing_extra(module, "graphtrain serve")
    _allow_connections()
    listener = bind(settings.host, settings.port)
    lifecycle = _Lifecycle(open_model, url_of(listener, settings.host), settings, log)
    lifecycle.worker.start()  # imports what the model needs while this thread imports uvicorn
    with listener:
        server = _uvicorn(lifecycle, settings)
        lifecycle.run(server, listener)
    if lifecycle.worker.error is not None:
        raise lifecycle.worker.error


class _Lifecycle:
    """Signals, and the ends of the worker and of the HTTP server, which wait for each other."""

    def __init__(
        self,
        open_model: Callable[[], OpenedModel],
        url: str,
        settings: ServerSettings,
        log: Callable[[str], None],
    ) -> None:
        self._url, self._log, self._began = url, log, time.monotonic()
        self._drain_seconds = settings.drain_seconds
        self._is_over = False
        self._server: Any = None
        self.worker = Worker(open_model, settings.max_queue, self._end, self._say_ready)

    def run(self, server: Any, listener: socket.socket) -> None:
        """Serve until the worker has ended."""
        self._server = server
        if not self._is_over:
            server.run(sockets=[listener])

    @asynccontextmanager
    async def lifespan(self, app: object) -> AsyncIterator[None]:
        """Handle signals in place of uvicorn, which would refuse connections at once."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, self._stop)
        yield

    def _say_ready(self) -> None:
        """Log the address, now that no request is answered with status 503."""
        self._log(f"listening on {self._url}")
        self._log(f"ready after {time.monotonic() - self._began:.1f} s")

    def _stop(self) -> None:
        """Drain at the first signal, if there may be requests; end at the second."""
        if self.worker.status != "ready":
            self.worker.stop()
            self._end()
            return
        self.worker.drain()
        self._log("finishing the requests that run; a second signal ends them")
        asyncio.get_running_loop().call_later(self._drain_seconds, self.worker.stop)

    def _end(self) -> None:
        self._is_over = True
        if self._server is not None:
            self._server.should_exit = True


def _uvicorn(lifecycle: _Lifecycle, settings: ServerSettings) -> Any:
    from graphtrain.run.serving.http.app import AppSettings, make_app
    from graphtrain.run.serving.http.connection import TimedConnection
    from graphtrain.run.serving.http.guard import is_local

    app_settings = AppSettings(
        model_name=settings.model_name,
        max_body=settings.max_body,
        request_seconds=settings.request_seconds,
        api_key=settings.api_key,
        only_local=is_local(settings.host),
    )
    return make_server(
        make_app(lifecycle.worker, app_settings, lifecycle.lifespan),
        http=TimedConnection,
        limit_concurrency=_MAX_CONNECTIONS,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_LAST_BYTES_SECONDS,
    )


def _allow_connections() -> None:
    """Raise the soft limit of open files, of which each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * _MAX_CONNECTIONS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
