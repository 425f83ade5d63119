"""A store on a real S3 server behind a network that fails half of the requests."""

import hashlib
import json
import shutil
from pathlib import Path
from random import Random

import pytest
from storage import FAULTS, credentials, failing, s3_server

from graphtrain.cache import Cache
from graphtrain.cache.exchange import pull, pull_from_shared_cache, push
from graphtrain.cache.key import CacheKey
from graphtrain.cache.remote import ObjectStore
from graphtrain.cache.trust import KeyStore
from graphtrain.errors import CacheError
from lowering.artifact import Artifact

pytest.importorskip("obstore")
pytest.importorskip("securesystemslib")

PARTS = 12_000_000  # bytes of a payload that goes in parts: obstore takes 5 MB each


@pytest.fixture
def url(tmp_path) -> str:
    return f"s3://team/{tmp_path.name}"


@pytest.fixture
def mine(tmp_path, keys) -> Cache:
    """Programs of three sizes, stored by the user whose keys these are."""
    cache = Cache(tmp_path / "mine")
    for number, size in enumerate((0, 1, 100_000)):
        add(cache, number, size)
    return cache


@pytest.fixture
def theirs(tmp_path) -> Cache:
    return Cache(tmp_path / "theirs")


@pytest.fixture
def keys(tmp_path, monkeypatch) -> KeyStore:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    made = KeyStore(tmp_path / "config" / "graphtrain" / "keys")
    made.create()
    return made


def add(cache: Cache, number: int, size: int) -> None:
    key = CacheKey.of(text=number)
    cache.put(key, Artifact(Random(number).randbytes(size), {"graph": "train"}))
    cache.record_request(CacheKey.of(graph="train", number=number), key)


def objects(buckets: Path, url: str) -> set[str]:
    """Names of the files that the server keeps of a store."""
    root = buckets / url.removeprefix("s3://")
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("fault", FAULTS)
def test_half_of_the_requests_are_enough(network, url, mine, theirs, keys, fault):
    network.share, network.faults = 0.5, (fault,)
    sent = push(mine, ObjectStore(url), keys)
    came = pull(theirs, ObjectStore(url), keys)
    assert network.met[fault] > 10 and set(network.met) == {fault, "passed"}
    assert len(sent.programs) == len(came.programs) == 3 and not sent.rejected + came.rejected
    assert theirs.stored_programs() == mine.stored_programs()
    assert theirs.verify().valid


def test_payloads_in_parts_survive_every_fault_at_once(network, url, mine, theirs, keys):
    add(mine, 4, PARTS)
    network.share, network.faults = 0.5, FAULTS
    push(mine, ObjectStore(url), keys)
    pull(theirs, ObjectStore(url), keys)
    assert set(network.met) == {*FAULTS, "passed"}
    assert theirs.stored_programs() == mine.stored_programs()
    assert theirs.verify().valid


@pytest.mark.parametrize("size", [100_000, PARTS])
def test_an_upload_that_is_cut_is_no_object(network, buckets, url, tmp_path, keys, size):
    cache = Cache(tmp_path / "cache")
    add(cache, 0, size)
    network.fails = lambda request: request.startswith("PUT")
    network.faults = ("cut upload",)
    with pytest.raises(CacheError, match=rf"cannot write {url}/v1/payloads/"):
        push(cache, ObjectStore(url, retry_seconds=0.5), keys)
    assert network.met["cut upload"] > 1 and not objects(buckets, url)


def test_a_store_that_goes_away_is_an_error_and_the_rest_goes_later(
    network, buckets, url, mine, theirs, keys
):
    def unplug(done: int, whole: int) -> None:
        network.share = 1.0

    with pytest.raises(CacheError, match=rf"cannot write {url}/v1/.* after [0-9]+ retries"):
        push(mine, ObjectStore(url, retry_seconds=0.5), keys, observe=unplug)
    before = objects(buckets, url)
    assert before
    with pytest.raises(CacheError, match=rf"cannot list {url}/v1/requests/"):
        pull(theirs, ObjectStore(url, retry_seconds=0.5), keys)
    network.share = 0.0
    assert not pull(theirs, ObjectStore(url), keys).rejected
    assert len(push(mine, ObjectStore(url), keys).programs) < 3
    assert objects(buckets, url) > before
    pull(theirs, ObjectStore(url), keys)
    assert theirs.stored_programs() == mine.stored_programs()


def test_a_pull_that_is_broken_off_keeps_what_came_and_goes_on(network, url, mine, theirs, keys):
    push(mine, ObjectStore(url), keys)
    lost, *_ = sorted(mine.stored_programs().values())
    network.fails = lambda request: f"/v1/programs/{lost}.json" in request
    with pytest.raises(CacheError, match=rf"cannot read {url}/v1/programs/{lost}.json"):
        pull(theirs, ObjectStore(url, retry_seconds=0.5), keys)
    assert theirs.verify().valid and not theirs.contains_program(lost)
    network.fails = None
    assert lost in pull(theirs, ObjectStore(url), keys).programs
    assert theirs.stored_programs() == mine.stored_programs()


def test_a_list_of_many_pages_goes_on_where_it_broke_off(tmp_path, monkeypatch):
    names = [f"v1/requests/{number:05}.json" for number in range(7_500)]
    (tmp_path / "team/v1/requests").mkdir(parents=True)
    for name in names:
        (tmp_path / "team" / name).touch()
    with s3_server(tmp_path) as server, failing(server, 0.5, ("cut answer",)) as network:
        for name, value in credentials(network.url).items():
            monkeypatch.setenv(name, value)
        assert list(ObjectStore("s3://team").names("v1/requests/")) == names
    assert network.met["cut answer"] > 1 and network.met["passed"] == 8  # pages of 1,000


def test_what_a_machine_lacks_comes_from_the_shared_cache(
    network, url, mine, theirs, keys, monkeypatch
):
    push(mine, ObjectStore(url), keys)
    monkeypatch.setenv("GRAPHTRAIN_SHARED_CACHE", url)
    network.share = 0.5
    wanted, said = sorted(mine.stored_programs())[:2], []
    pull_from_shared_cache(theirs, wanted, said.append)
    assert sorted(theirs.stored_programs()) == wanted
    assert said == [f"fetched 2 programs from {url}"]
    network.share = 1.0
    pull_from_shared_cache(theirs, wanted, said.append)  # asks nobody: all is here
    assert len(said) == 1


def test_the_shared_cache_of_a_stranger_is_refused(network, url, mine, theirs, keys, monkeypatch):
    push(mine, ObjectStore(url), keys)
    monkeypatch.setenv("GRAPHTRAIN_SHARED_CACHE", url)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(theirs.root))
    said: list[str] = []
    pull_from_shared_cache(theirs, mine.stored_programs(), said.append)
    assert len(said) == 3 and all("which is not a trusted key" in line for line in said)
    assert not theirs.stored_programs()


def test_a_wrong_password_is_told_at_once(network, url, mine, keys, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(CacheError, match="SignatureDoesNotMatch"):
        ObjectStore(url).put("v1/name", b"")
    with pytest.raises(CacheError, match=r"cannot list .*SignatureDoesNotMatch"):
        push(mine, ObjectStore(url), keys)


def test_what_is_damaged_here_is_not_sent_and_told(url, network, mine, theirs, keys):
    damaged, *_ = sorted(mine.stored_programs().values())
    (mine.root / "v1" / "programs" / damaged / "payload").write_bytes(b"other")
    sent = push(mine, ObjectStore(url), keys)
    assert len(sent.programs) == len(sent.requests) == 2
    assert len(sent.rejected) == 1 and f"{damaged} cannot be used: payload" in sent.rejected[0]
    came = pull(theirs, ObjectStore(url), keys)
    assert len(came.programs) == 2 and not came.rejected


def test_of_two_who_push_at_once_one_wins_whole(url, network, tmp_path, theirs, keys, monkeypatch):
    """Both compile the same program to other bytes; every order of their writes is sound."""
    stores = Cache(tmp_path / "first"), Cache(tmp_path / "second")
    request = CacheKey.of(graph="train")
    for number, cache in enumerate(stores):
        cache.put(CacheKey.of(text=""), Artifact(bytes([number]), {"number": number}))
        cache.record_request(request, CacheKey.of(text=""))
    puts: list[tuple[str, bytes]] = []
    for cache in stores:
        with monkeypatch.context() as patched:
            patched.setattr(ObjectStore, "put", lambda self, *put: puts.append(put))
            push(cache, ObjectStore(url), keys)
    first, second = puts[:5], puts[5:]
    for seed in range(10):
        order = [0] * 5 + [1] * 5
        Random(seed).shuffle(order)
        store, queues = ObjectStore(f"{url}/{seed}"), (iter(first), iter(second))
        for which in order:
            store.put(*next(queues[which]))
        taker = Cache(theirs.root / str(seed))
        assert pull(taker, store, keys).requests == [request.digest]
        assert taker.verify().valid


def test_the_commands_say_what_was_refused_and_exit_2(network, url, mine, keys, capsys):
    from click.testing import CliRunner

    from graphtrain.cli.cache import command

    def run(*words: str):
        return CliRunner().invoke(command, [*words, "--cache", str(mine.root)])

    assert run("push", url).output == f"push {url}: 3 programs, 100.9 kB, 3 requests\n"
    tampered, *_ = sorted(mine.stored_programs().values())
    record, _ = mine.program_files(tampered)
    ObjectStore(url).put(f"v1/payloads/{hashlib.sha256(record).hexdigest()}", b"other")
    shutil.rmtree(mine.root / "v1" / "programs" / tampered)
    done = run("sync", url, "--json")
    assert done.exit_code == 2
    refused = json.loads(done.output)["pull"]["rejected"]
    assert len(refused) == 1 and "tampered with" in refused[0]
