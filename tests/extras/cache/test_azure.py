"""Azure Blob Storage, as far as a small server on this machine speaks its interface.

It deletes nothing: that is a request with several requests in its body.
"""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

from graphtrain.cache.remote import ObjectStore
from graphtrain.cache.store_errors import UnusableObject
from graphtrain.errors import CacheError

pytest.importorskip("obstore")
DATE = "Wed, 25 Nov 2026 12:00:00 GMT"


class Container(ThreadingHTTPServer):
    """Blobs by path; every other request is answered with 503."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.blobs: dict[str, bytes] = {}
        self.signed: set[str] = set()
        self.requests = 0


class _Request(BaseHTTPRequestHandler):
    server: Container

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response_only(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Last-Modified", DATE)
        self.send_header("ETag", '"1"')
        self.end_headers()
        self.wfile.write(body)

    def _serve(self) -> None:
        server, place = self.server, urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        server.signed.add(str(self.headers["Authorization"]).partition(":")[0])
        server.requests += 1
        if server.requests % 2:
            self._answer(503)
        elif self.command == "PUT":
            server.blobs[place.path] = body
            self._answer(201)
        elif "list" in parse_qs(place.query).get("comp", []):
            self._answer(200, self._listing(place.path, parse_qs(place.query)["prefix"][0]))
        elif place.path not in server.blobs:
            self._answer(404)
        else:
            self._answer(200, server.blobs[place.path])

    do_GET = do_PUT = _serve

    def _listing(self, container: str, prefix: str) -> bytes:
        found = {
            path.removeprefix(f"{container}/"): blob for path, blob in self.server.blobs.items()
        }
        blobs = "".join(
            f"<Blob><Name>{name}</Name><Properties><Last-Modified>{DATE}</Last-Modified>"
            f"<Content-Length>{len(blob)}</Content-Length><Etag>1</Etag>"
            "<Content-Type>text/plain</Content-Type></Properties></Blob>"
            for name, blob in sorted(found.items()) if name.startswith(prefix)
        )  # fmt: skip
        return (
            f"<EnumerationResults><Blobs>{blobs}</Blobs><NextMarker/></EnumerationResults>".encode()
        )

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@pytest.fixture
def container(monkeypatch) -> Iterator[Container]:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")
    server = Container()
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    "url", ["az://box/runs/one", "abfss://box@account.dfs.core.windows.net/runs/one"]
)
def test_objects_are_written_listed_and_read_while_half_of_the_requests_fail(container, url):
    store = ObjectStore(url, 20.0, endpoint=f"http://127.0.0.1:{container.server_port}")
    store.put("v1/steps/4.json", b"four")
    store.put("v1/steps/8.json", b"eight")
    assert set(container.blobs) == {f"/box/runs/one/v1/steps/{step}.json" for step in (4, 8)}
    assert list(store.names("v1/steps/")) == ["v1/steps/4.json", "v1/steps/8.json"]
    assert store.get("v1/steps/8.json", 10) == b"eight" and store.get("v1/none", 10) is None
    with pytest.raises(UnusableObject, match="has 4 bytes, more than the 3 that it may have"):
        store.get("v1/steps/4.json", 3)
    assert container.signed == {"SharedKey account"}


def test_a_server_in_place_of_google_cloud_storage_is_named_by_the_interface_of_s3():
    with pytest.raises(CacheError, match=r"gs://box/one has no endpoint .*; write s3://box/one"):
        ObjectStore("gs://box/one", endpoint="https://example.org")
