"""Servers of this machine: the socket on which one listens, and uvicorn's settings."""

import socket
from typing import Any

from graphtrain.errors import GraphtrainError

_BACKLOG = 2048


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens, so that clients can connect before the server is ready.

    Raises:
        GraphtrainError: the address does not exist, or is in use.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, OverflowError) as error:
        reason = str(getattr(error, "strerror", None) or error).partition(" (while")[0]
        raise GraphtrainError(
            f"cannot listen on {host} port {port}: {reason}; choose another with --host or --port"
        ) from None


def make_server(app: Any, **settings: Any) -> Any:
    """Return uvicorn's server of an application, which logs warnings only and says no version.

    Args:
        app: Application of starlette, with a lifespan.
        settings: Other settings of uvicorn.
    """
    import uvicorn

    config = uvicorn.Config(
        app,
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        **settings,
    )
    return uvicorn.Server(config)


def url_of(listener: socket.socket, host: str) -> str:
    """Return the address that a browser opens."""
    port = listener.getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
