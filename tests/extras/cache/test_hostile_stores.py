"""Stores that an enemy filled: each bad object is one line, and the good programs come."""

import base64
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from graphtrain.cache import Cache
from graphtrain.cache.exchange import pull, push
from graphtrain.cache.key import CacheKey
from graphtrain.cache.remote import ObjectStore
from graphtrain.cache.trust import KeyStore, UntrustedError
from graphtrain.cli.cache import command
from lowering.artifact import Artifact

pytest.importorskip("obstore")
pytest.importorskip("securesystemslib")

GIGABYTES = 12 << 30
CONTROL = set(map(chr, [*range(9), *range(11, 32), *range(127, 160)]))


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> KeyStore:
    made = KeyStore(tmp_path_factory.mktemp("keys"))
    made.create()
    return made


@pytest.fixture(scope="module")
def honest(tmp_path_factory, keys) -> Path:
    """A store of three programs."""
    path = tmp_path_factory.mktemp("honest")
    cache = Cache(path / "cache")
    for number in range(3):
        key = CacheKey.of(text=number)
        cache.put(key, Artifact(bytes(2 + number), {"graph": "train"}))
        cache.record_request(CacheKey.of(graph="train", number=number), key)
    push(cache, ObjectStore(str(path / "store")), keys)
    return path / "store"


@pytest.fixture
def store(tmp_path, honest) -> Path:
    return Path(shutil.copytree(honest, tmp_path / "store"))


def victim_of(store: Path, kind: str) -> Path:
    """An object of the first program: its request, record, payload, or a signature."""
    request = min((store / "v1" / "requests").iterdir())
    if kind == "requests":
        return request
    if kind == "request signature":
        return store / "v1" / "signatures" / hashlib.sha256(request.read_bytes()).hexdigest()
    digest = json.loads(request.read_bytes())["program"]
    record = store / "v1" / "programs" / f"{digest}.json"
    sha256 = hashlib.sha256(record.read_bytes()).hexdigest()
    folder = {"payloads": "payloads", "record signature": "signatures"}.get(kind)
    return record if folder is None else store / "v1" / folder / sha256


OBJECTS = "requests", "programs", "payloads", "request signature", "record signature"


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def link_to_zeros(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


@pytest.mark.parametrize(
    "damage",
    [lambda path: os.truncate(path, GIGABYTES), pipe, directory, link_to_zeros, loop],
    ids=["12 GiB", "named pipe", "directory", "/dev/zero", "loop"],
)
@pytest.mark.parametrize("kind", OBJECTS)
def test_an_object_that_must_not_be_read_is_one_line_and_the_others_come(
    store, keys, tmp_path, kind, damage
):
    damage(victim_of(store, kind))
    result = pull(Cache(tmp_path / "cache"), ObjectStore(str(store)), keys)
    assert len(result.programs) == 2 and len(result.requests) == 2
    assert len(result.rejected) + len(result.missing) <= 1


def test_the_size_is_said(store, keys, tmp_path):
    os.truncate(victim_of(store, "payloads"), GIGABYTES)
    (reason,) = pull(Cache(tmp_path / "cache"), ObjectStore(str(store)), keys).rejected
    assert f"has {GIGABYTES} bytes, more than the " in reason


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)
TEXT = st.text(st.characters(exclude_categories=()), max_size=30)  # lone surrogates too
SIGNATURE = st.fixed_dictionaries(
    {}, optional={"keyid": JSON | TEXT, "sig": JSON | TEXT, "extension": JSON}
)
ENVELOPE = st.fixed_dictionaries(
    {},
    optional={
        "payload": JSON | TEXT | st.binary(max_size=30).map(lambda b: base64.b64encode(b).decode()),
        "payloadType": JSON | TEXT | st.just("application/vnd.graphtrain.statement+json"),
        "signatures": JSON | st.lists(SIGNATURE, max_size=3) | st.dictionaries(TEXT, JSON),
    },
)


def sane(**changes):
    kind = "application/vnd.graphtrain.statement+json"
    signature = {"keyid": "0" * 64, "sig": "AAAA"} | changes.pop("signature", {})
    return {"payload": "e30=", "payloadType": kind, "signatures": [signature]} | changes


@settings(max_examples=200, derandomize=True)
@given(ENVELOPE | JSON)
@example(sane(signature={"keyid": 5}))
@example(sane(signature={"keyid": None}))
@example(sane(signature={"keyid": "\x1b]0;owned\x07"}))
@example(sane(signature={"sig": 5}))
@example(sane(signature={"sig": "é"}))
@example(sane(payloadType=5))
@example(sane(payloadType="\ud800"))
@example(sane(payload="\ud800"))
@example(sane(payload="!"))
@example(sane(signatures=[sane()["signatures"][0]] * 10_000))
@example(sane())
def test_an_odd_envelope_is_refused_in_printable_words(keys, body):
    with pytest.raises(UntrustedError) as refusal:
        keys.verify(json.dumps(body).encode(), {"program": "x"}, "program x")
    assert CONTROL.isdisjoint(str(refusal.value)) and str(refusal.value).isascii()


@settings(max_examples=100, derandomize=True)
@given(st.binary(max_size=200))
@example(b"[" * 60_000)
@example(b'{"payload":' * 5_000)
@example(b'{"payload": ' + b"9" * 5_000 + b"}")
def test_bytes_that_are_no_envelope_are_refused(keys, data):
    with pytest.raises(UntrustedError, match="not a DSSE envelope"):
        keys.verify(data, {"program": "x"}, "program x")


@settings(
    max_examples=100,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.data())
def test_a_hostile_store_gives_what_is_signed_and_nothing_else(honest, keys, data):
    with tempfile.TemporaryDirectory() as folder:
        store = Path(shutil.copytree(honest, Path(folder) / "store"))
        files = sorted(path for path in store.rglob("*") if path.is_file())
        for path in data.draw(st.lists(st.sampled_from(files), min_size=1, max_size=4)):
            contents = path.read_bytes()
            position = data.draw(st.integers(0, len(contents)))
            path.write_bytes(
                data.draw(
                    st.sampled_from(
                        [
                            contents[:position] + b"\x1b[2J" + contents[position:],
                            contents[:position],
                            files[position % len(files)].read_bytes(),
                            b"[" * 50_000,
                        ]
                    )
                    | st.binary(max_size=100)
                    | (ENVELOPE | JSON).map(lambda body: json.dumps(body).encode())
                )
            )
        cache = Cache(Path(folder) / "cache")
        result = pull(cache, ObjectStore(str(store)), keys)
        assert cache.verify().valid
        for digest in result.programs:
            number = len(cache.get(digest).payload) - 2
            assert CacheKey.of(text=number).digest == digest
        assert all(CONTROL.isdisjoint(reason) for reason in result.rejected)


def test_names_in_a_cache_cannot_command_the_terminal(tmp_path):
    cache, evil = Cache(tmp_path / "cache"), "\x1b[2Jtrain\x9b1m\n\ud800\u202e"
    key = CacheKey.of(text="x")
    cache.put(key, Artifact(b"", {"graph": evil}))
    cache.record_request(CacheKey.of(graph=evil, target=evil), key, graph=evil)
    (cache.root / "v1" / "requests" / f"{'0' * 40}.json").write_text(json.dumps({"schema": evil}))
    for words in (["ls"], ["verify"], ["show", key.digest], ["ls", "--json"]):
        output = CliRunner().invoke(command, [*words, "--cache", str(cache.root)]).output
        assert output and CONTROL.isdisjoint(output.replace("\n", "")) and "\u202e" not in output


@pytest.mark.parametrize("kind", OBJECTS)
def test_a_push_repairs_what_a_pull_would_refuse(store, honest, keys, tmp_path, kind):
    path, mine = victim_of(store, kind), Cache(honest.parent / "cache")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    remote = ObjectStore(str(store))
    assert not push(mine, remote, keys).replaced
    sent = push(mine, remote, keys, verify=True)
    assert sent.replaced and len(sent.programs) + len(sent.requests) == len(sent.replaced)
    assert not push(mine, remote, keys, verify=True).replaced
    result = pull(Cache(tmp_path / "cache"), remote, keys)
    assert len(result.programs) == 3 and not result.rejected


def test_a_push_leaves_what_an_unknown_key_signed(store, honest, tmp_path):
    others = KeyStore(tmp_path / "keys")
    others.create()
    sent = push(Cache(honest.parent / "cache"), ObjectStore(str(store)), others, verify=True)
    assert not sent.replaced and not sent.programs and not sent.requests
