"""Socket on which a server of this machine listens."""

import socket

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


def url_of(listener: socket.socket, host: str) -> str:
    """Return the address that a browser opens."""
    port = listener.getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
