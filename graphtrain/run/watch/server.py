"""Server of the page, until SIGTERM or Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from graphtrain.cache import Cache
from graphtrain.run.serving.http.listener import bind, make_server, url_of
from lowering.machine.extras import is_installed, missing_extra

_LAST_BYTES_SECONDS = 2
_MAX_CONNECTIONS = 100


def serve_page(
    directories: Sequence[Path], cache: Cache, *, host: str, port: int, log: Callable[[str], None]
) -> None:
    """Serve a page of runs until SIGTERM or Ctrl-C. Files are read when a page asks for news.

    Args:
        directories: Directories of the runs.
        cache: Cache in which the records of their compiled steps are looked up.
        host: Address to listen on.
        port: Port to listen on; 0 for any that is free.
        log: Called with the address.

    Raises:
        MissingExtra: a package of the extras `serve` and `html` is not installed.
        GraphtrainError: the port cannot be used.
    """
    for module in ("starlette", "uvicorn", "vl_convert"):
        if not is_installed(module):
            raise missing_extra(module, "graphtrain watch", "html,serve")
    with bind(host, port) as listener:
        server = _server(directories, cache, host)
        log(f"listening on {url_of(listener, host)}; Ctrl-C ends it")
        server.run(sockets=[listener])


def _server(directories: Sequence[Path], cache: Cache, host: str) -> Any:
    from graphtrain.run.serving.http.guard import is_local
    from graphtrain.run.watch.app import make_app
    from graphtrain.run.watch.watched_run import WatchedRun

    @asynccontextmanager
    async def lifespan(app: object) -> AsyncIterator[None]:
        """Handle signals in place of uvicorn, which would raise them again at its end."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, end)
        yield

    def end() -> None:
        server.should_exit = True

    names = run_names(directories)
    runs = [WatchedRun(*one, cache) for one in zip(names, directories, strict=True)]
    server = make_server(
        make_app(runs, only_local=is_local(host), lifespan=lifespan),
        limit_concurrency=_MAX_CONNECTIONS,
        timeout_graceful_shutdown=_LAST_BYTES_SECONDS,
    )
    return server


def run_names(directories: Sequence[Path]) -> list[str]:
    """Return a name for each run: that of its directory, or its path where names are the same."""
    names = [directory.resolve().name for directory in directories]
    counts = Counter(names)
    return [
        name if counts[name] == 1 else str(directory)
        for name, directory in zip(names, directories, strict=True)
    ]
