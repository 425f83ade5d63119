"""Programs that go to a store elsewhere and come back, and those that must not."""

import hashlib
import itertools
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from storage import credentials, s3_server

from graphtrain.cache import Cache
from graphtrain.cache.exchange import pull, push
from graphtrain.cache.key import CacheKey
from graphtrain.cache.remote import ObjectStore
from graphtrain.cache.trust import KeyStore
from graphtrain.errors import CacheError
from lowering.artifact import Artifact

obstore = pytest.importorskip("obstore")
pytest.importorskip("securesystemslib")


def fill(cache: Cache, count: int, size: int = 1000) -> list[str]:
    """Programs of as many requests; digests of the requests."""
    digests = []
    for number in range(count):
        key = CacheKey.of(graph="train", text=f"program {number}", target="cpu:1")
        cache.put(key, Artifact(random.Random(number).randbytes(size), {"graph": "train"}))
        request = CacheKey.of(graph="train", program=number, target="cpu:1")
        cache.record_request(request, key)
        digests.append(request.digest)
    return digests


@pytest.fixture
def mine(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "mine")


@pytest.fixture
def theirs(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "theirs")


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory) -> Iterator[str]:
    buckets = tmp_path_factory.mktemp("buckets")
    (buckets / "team").mkdir()
    with s3_server(buckets) as url:
        yield url


@pytest.fixture(params=["directory", "s3"])
def store(request, tmp_path, monkeypatch) -> ObjectStore:
    if request.param == "directory":
        return ObjectStore(str(tmp_path / "store"))
    for name, value in credentials(request.getfixturevalue("endpoint")).items():
        monkeypatch.setenv(name, value)
    return ObjectStore(f"s3://team/{tmp_path.name}")


@pytest.fixture
def keys(tmp_path: Path) -> KeyStore:
    made = KeyStore(tmp_path / "keys")
    made.create()
    return made


def friend(tmp_path: Path, keys: KeyStore) -> KeyStore:
    """Somebody else, who trusts us."""
    public = tmp_path / "public.json"
    public.write_text(json.dumps(keys.own_public_key()))
    other = KeyStore(tmp_path / "friend")
    other.trust("maker", public)
    return other


def test_what_is_pushed_is_pulled_whole_and_only_once(tmp_path, mine, theirs, store, keys):
    digests = fill(mine, 20)
    sent = push(mine, store, keys)
    assert len(sent.programs) == 20 and sorted(sent.requests) == sorted(digests)
    assert not push(mine, store, keys).programs
    came = pull(theirs, store, friend(tmp_path, keys))
    assert len(came.programs) == 20 and came.nbytes == sent.nbytes and not came.rejected
    assert theirs.stored_programs() == mine.stored_programs()
    for program in mine.stored_programs().values():
        assert theirs.get(program) == mine.get(program)
    assert not pull(theirs, store, keys).programs


def test_only_what_is_chosen_goes_and_what_is_not_there_is_told(mine, theirs, store, keys):
    first, second, third = fill(mine, 3)
    push(mine, store, keys, [first, second])
    came = pull(theirs, store, keys, [second, third])
    assert came.requests == [second] and came.missing == [third]


def test_a_program_of_several_requests_comes_once(mine, theirs, store, keys):
    (digest,) = fill(mine, 1)
    program = mine.stored_programs()[digest]
    for number in range(10):
        mine.record_request(CacheKey.of(graph="train", again=number), program)
    push(mine, store, keys)
    came = pull(theirs, store, keys)
    assert came.programs == [program] and len(came.requests) == 11


def test_without_a_key_nothing_is_sent(tmp_path, mine, store):
    fill(mine, 1)
    with pytest.raises(CacheError, match=r"no signing key; create one: graphtrain cache key new"):
        push(mine, store, KeyStore(tmp_path / "nobody"))
    assert not list(store.names("v1/"))


def test_a_stranger_is_refused_and_nothing_is_kept(tmp_path, mine, theirs, store, keys):
    fill(mine, 2)
    push(mine, store, keys)
    stranger = KeyStore(tmp_path / "stranger")
    stranger.create()
    came = pull(theirs, store, stranger)
    assert len(came.rejected) == 2 and "which is not a trusted key" in came.rejected[0]
    assert not theirs.list() and not theirs.stored_programs()


def test_who_is_trusted_no_longer_is_refused(tmp_path, mine, theirs, store, keys):
    fill(mine, 1)
    push(mine, store, keys)
    other = friend(tmp_path, keys)
    other.untrust("maker")
    assert pull(theirs, store, other).rejected


def read(store: ObjectStore, name: str) -> bytes:
    found = store.get(name, limit=10**9)
    assert found is not None
    return found


def signature_of(signed: bytes) -> str:
    return f"v1/signatures/{hashlib.sha256(signed).hexdigest()}"


def payload_of(record: bytes) -> str:
    return f"v1/payloads/{hashlib.sha256(record).hexdigest()}"


def stored(store: ObjectStore, digest: str) -> dict[str, bytes]:
    """What a store holds of a program."""
    record = read(store, f"v1/programs/{digest}.json")
    payload, signature = read(store, payload_of(record)), read(store, signature_of(record))
    return {"record": record, "payload": payload, "signature": signature}


def forge(store: ObjectStore, digest: str, record: bytes, payload: bytes, signature: bytes) -> None:
    """Put something in a program's place."""
    store.put(f"v1/programs/{digest}.json", record)
    store.put(payload_of(record), payload)
    store.put(signature_of(record), signature)


TAMPERED = {
    "payload": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "record": lambda data: data.replace(b'"graph"', b'"Graph"', 1),
    "signature": lambda data: data.replace(b'"sig": "', b'"sig": "AAAA', 1),
}


@pytest.mark.parametrize("part", TAMPERED)
def test_what_was_tampered_with_is_refused(mine, theirs, store, keys, part):
    (digest,) = fill(mine, 1)
    push(mine, store, keys)
    program = mine.stored_programs()[digest]
    true = stored(store, program)
    false = true | {part: TAMPERED[part](true[part])}
    assert false != true
    forge(store, program, **false)
    (reason,) = pull(theirs, store, keys).rejected
    assert any(
        cause in reason for cause in ("tampered with", "not a trusted key", "not a DSSE envelope")
    )
    assert not theirs.list() and not theirs.stored_programs()


def test_a_request_cannot_be_led_to_another_program(mine, theirs, store, keys):
    """Both are signed, but not together."""
    first, second = fill(mine, 2)
    push(mine, store, keys)
    store.put(f"v1/requests/{first}.json", read(store, f"v1/requests/{second}.json"))
    (reason,) = pull(theirs, store, keys, [first]).rejected
    assert "tampered with" in reason and not theirs.stored_programs()


def test_programs_cannot_change_places(mine, theirs, store, keys):
    first, second = (mine.stored_programs()[digest] for digest in fill(mine, 2))
    push(mine, store, keys)
    forge(store, first, **stored(store, second))
    reasons = pull(theirs, store, keys).rejected
    assert len(reasons) == 1 and "tampered with" in reasons[0]


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b'{"payload": 3}', b"[" * 100_000, b"x" * 10**6]
)
def test_a_signature_that_is_none_is_refused(mine, theirs, store, keys, text):
    fill(mine, 1)
    push(mine, store, keys)
    (request,) = mine.stored_programs()
    store.put(signature_of(mine.request_file(request)), text)
    (reason,) = pull(theirs, store, keys).rejected
    assert "not a DSSE envelope" in reason or "000 bytes, more than the 65536" in reason


def test_half_a_program_is_refused_until_it_is_pushed_again(mine, theirs, store, keys):
    (digest,) = fill(mine, 1)
    push(mine, store, keys)
    program = mine.stored_programs()[digest]
    obstore.delete(store._store, f"v1/programs/{program}.json")
    (reason,) = pull(theirs, store, keys).rejected
    assert "its record or payload is missing; push it again" in reason
    push(mine, store, keys)
    assert pull(theirs, store, keys).programs == [program]


KILLED = """
import sys
from pathlib import Path
from graphtrain.cache import Cache
from graphtrain.cache.exchange import pull, push
from graphtrain.cache.remote import ObjectStore
from graphtrain.cache.trust import KeyStore
verb, cache, store, keys = sys.argv[1:]
print("begun", flush=True)
{"pull": pull, "push": push}[verb](Cache(Path(cache)), ObjectStore(store), KeyStore(Path(keys)))
"""


@pytest.mark.parametrize("verb", ["push", "pull"])
def test_killed_at_any_moment_it_goes_on_and_loses_nothing(
    tmp_path, mine, theirs, store, keys, verb
):
    fill(mine, 60, size=100_000)
    if verb == "pull":
        push(mine, store, keys)
    begins = mine if verb == "push" else theirs
    words = [
        sys.executable,
        "-c",
        KILLED,
        verb,
        str(begins.root),
        store.url,
        str(tmp_path / "keys"),
    ]
    for round_ in range(6):
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None and process.stdout.readline()
        time.sleep(0.02 * round_)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    if verb == "push":
        push(mine, store, keys)
    assert not pull(theirs, store, keys).rejected
    assert theirs.stored_programs() == mine.stored_programs()
    assert theirs.verify().valid


class _Unreliable(SimpleHTTPRequestHandler):
    """Answers every second request."""

    asked = itertools.count()

    def do_GET(self) -> None:
        if next(self.asked) % 2:
            super().do_GET()
        else:
            self.send_error(503)

    def log_message(self, *about) -> None:
        pass


def test_over_http_half_of_the_answers_are_enough(tmp_path, mine, theirs, keys):
    digests = fill(mine, 4)
    push(mine, ObjectStore(str(tmp_path / "store")), keys)
    serve = partial(_Unreliable, directory=str(tmp_path / "store"))
    with ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        web = ObjectStore(f"http://127.0.0.1:{server.server_port}")
        came = pull(theirs, web, keys, digests)
        with pytest.raises(CacheError, match="cannot list"):
            pull(theirs, web, keys)
        server.shutdown()
    assert len(came.programs) == 4 and not came.rejected
    assert theirs.stored_programs() == mine.stored_programs()


def test_a_key_is_made_once_and_is_private(tmp_path):
    keys = KeyStore(tmp_path / "keys")
    keys.create()
    assert (tmp_path / "keys" / "private.pem").stat().st_mode & 0o777 == 0o600
    with pytest.raises(CacheError, match="exists; remove it"):
        keys.create()


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden"])
def test_a_name_that_leads_elsewhere_is_none(tmp_path, keys, name):
    public = tmp_path / "public.json"
    public.write_text(json.dumps(keys.own_public_key()))
    with pytest.raises(CacheError, match="is not a valid key name"):
        keys.trust(name, public)


def test_a_store_of_no_known_kind_is_refused():
    with pytest.raises(CacheError, match="cannot open ftp://somewhere/"):
        ObjectStore("ftp://somewhere")


def test_what_is_no_url_of_a_store_or_server_is_refused_before_anything_is_asked(monkeypatch):
    with pytest.raises(CacheError, match=r"s3:/bucket/x is no URL .*; write s3://bucket/x"):
        ObjectStore("s3:/bucket/x")
    with pytest.raises(CacheError, match=r's3://bucket: endpoint = "127.0.0.1:9" is not the URL'):
        ObjectStore("s3://bucket", endpoint="127.0.0.1:9")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "localhost")
    with pytest.raises(CacheError, match=r'AWS_ENDPOINT_URL = "localhost" is not the URL of a ser'):
        ObjectStore("s3://bucket")


def test_a_store_to_pull_from_is_not_made(tmp_path):
    with pytest.raises(CacheError, match=r"stroe: no such directory"):
        ObjectStore(str(tmp_path / "stroe"), create=False)
    assert not list(tmp_path.iterdir())
