"""Files of checkpoints that hosts send each other: over HTTP, verified by their digest.

Each process of a run serves the parts on its own disk while the run trains. The address and a
random token, without which nothing is answered, are exchanged through the service of the run.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from urllib.parse import quote, unquote

import xxhash

from graphtrain.checkpoints.host_tier import HostTier
from graphtrain.checkpoints.manifest import is_intact
from graphtrain.errors import TrainingError
from lowering.xla import distributed, joining

_DIGEST = "X-Graphtrain-XXH3"  # of the content, which has that with which it was written
_MISSING, _DAMAGED = 404, 410  # status of a file that is not on this host, or only damaged
_TIMEOUT = 60.0  # seconds without an answer, or the next part of it
_NAMES = "names"  # in place of a file: those of the host's own part


class PeerServer:
    """Server of the parts of this host."""

    def __init__(self, tier: HostTier, address: str, token: str) -> None:
        """Start to serve.

        Args:
            tier: The parts.
            address: Name or address at which the other hosts reach this one.
            token: What they have to know.

        Raises:
            OSError: there is no free port.
        """
        self._server = _Server(tier, token, *_place(address))
        self.port = int(self._server.server_address[1])
        threading.Thread(
            target=self._server.serve_forever, name="checkpoints for peers", daemon=True
        ).start()

    def close(self) -> None:
        """Stop to serve."""
        self._server.shutdown()
        self._server.server_close()


def _place(address: str) -> tuple[int, str]:
    """Return the family and the address to listen on, as rank 0 does for the run's own service."""
    if found := joining.bind_address(f"{address}:0"):
        host = found.rpartition(":")[0].strip("[]")
        return (socket.AF_INET6 if ":" in host else socket.AF_INET), host
    # The host resolves its own name to a loopback address, at which no other host finds it.
    return (socket.AF_INET6, "::") if socket.has_dualstack_ipv6() else (socket.AF_INET, "")


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, tier: HostTier, token: str, family: int, address: str) -> None:
        self.tier, self.token = tier, token
        self.address_family = family
        super().__init__((address, 0), _Request)

    def server_bind(self) -> None:
        """Listen, without looking up a name for the address, for which DNS may take long."""
        TCPServer.server_bind(self)

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: the host that asked notices, and reports what it misses."""


class _Request(BaseHTTPRequestHandler):
    timeout = _TIMEOUT

    def do_GET(self) -> None:
        assert isinstance(self.server, _Server)
        token, step, save, *names = map(unquote, self.path.lstrip("/").split("/"))
        if not hmac.compare_digest(token.encode(), self.server.token.encode()):
            return self._refuse()
        tier, name = self.server.tier, "/".join(names)
        if name == _NAMES:
            held = tier.names(int(step), save)
            return self._answer(json.dumps(held).encode()) if held else self._refuse()
        content, damaged = tier.look_up(int(step), save, name)
        if content is not None:
            return self._answer(content)
        return self._refuse(_DAMAGED if damaged else _MISSING)

    def _answer(self, content: bytes) -> None:
        self.send_response_only(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header(_DIGEST, xxhash.xxh3_128_hexdigest(content))
        self.end_headers()
        self.wfile.write(content)

    def _refuse(self, status: int = _MISSING) -> None:
        self.send_response_only(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@dataclass(frozen=True)
class Peers:
    """The processes of a run, as sources of files."""

    addresses: Sequence[tuple[str, int]]  # host and port, by rank
    token: str

    def names(self, rank: int, step: int, save: str) -> list[str] | None:
        """Return the files of the own part of a rank; None if it has none, or does not answer."""
        content = self._ask(rank, step, save, _NAMES)
        return None if content is None else json.loads(content)

    def read(self, rank: int, step: int, save: str, name: str) -> bytes | None:
        """Return a file of a save from a rank; None if it has no sound one, or does not answer."""
        return self._ask(rank, step, save, name)

    def _ask(self, rank: int, step: int, save: str, name: str) -> bytes | None:
        connection = HTTPConnection(*self.addresses[rank], timeout=_TIMEOUT)
        try:
            path = "/".join(quote(part, safe="") for part in (self.token, str(step), save))
            connection.request("GET", f"/{path}/{quote(name)}")
            answer = connection.getresponse()
            content = answer.read()
            entry = {"size": len(content), "xxh3_128": answer.getheader(_DIGEST)}
            if answer.status == 200 and is_intact(content, entry):
                return content
            if answer.status in (200, _DAMAGED):
                _warn(f"{distributed.names([rank])} has a damaged {name} of step {step}")
        except (OSError, HTTPException) as error:
            _warn(f"{distributed.names([rank])} does not send {name} of step {step}: {error}")
        finally:
            connection.close()
        return None


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=1)


def connect_peers(tier: HostTier) -> tuple[PeerServer, Peers]:
    """Serve the parts of this host, and exchange addresses. Called on every rank.

    Raises:
        TrainingError: a host cannot serve; on every rank.
    """
    token = distributed.all_gather_text(secrets.token_hex(16))[0]
    server, word = None, ""
    try:
        address = distributed.own_address()
        server = PeerServer(tier, address, token)
        word = json.dumps([address, server.port])
    except OSError as error:
        word = f"{distributed.names([distributed.rank()])}: {error}"
    words = distributed.all_gather_text(word)
    if failed := [word for word in words if not word.startswith("[")]:
        raise TrainingError(
            "hosts cannot send each other their checkpoints, which are on disks of their own "
            f"(run.checkpoints.local): {failed[0]}; correct it, or unset run.checkpoints.local"
        )
    assert server is not None
    return server, Peers([(host, port) for host, port in map(json.loads, words)], token)
