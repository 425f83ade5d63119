import os
from pathlib import Path

import pytest

from graphtrain.cache import Cache, default_root
from graphtrain.cache.key import CacheKey
from graphtrain.errors import CacheError
from lowering.artifact import Artifact

RECORD = {"graph": "train", "inputs": {"w": {"shape": [2, 3], "dtype": "float32"}}, "cost": 1e-3}
ARTIFACT = Artifact(b"\x00executable\xff" * 100, RECORD)
KEY = CacheKey.of(text="module {}", options={}, target="cpu:8", toolchain={"jax": "0.10.2"})


def request(target: object = "cpu:8", edited: str = "") -> CacheKey:
    return CacheKey.of(graph="train", sources={"a.py": edited}, target=target)


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path / "store")


def test_what_is_put_is_got_by_key_and_by_digest(cache):
    cache.put(KEY, ARTIFACT)
    assert cache.get(KEY) == ARTIFACT
    assert Cache(cache.root).get(KEY.digest) == ARTIFACT


def test_the_order_of_a_record_is_kept(cache):
    record = {"mesh": {"tensor": 1, "data": 2}, "arguments": ["state", "batch"]}
    cache.put(KEY, Artifact(b"x", record))
    assert list(cache.get(KEY).record["mesh"]) == ["tensor", "data"]


def test_an_absent_key_is_none_and_makes_nothing(cache):
    assert cache.get(KEY) is None
    assert cache.get_by_request(request()) is None
    assert not cache.contains(request())
    assert cache.list() == ()
    assert not cache.root.exists()


def test_the_first_of_two_programs_of_a_key_stays(cache):
    cache.put(KEY, ARTIFACT)
    cache.put(KEY, Artifact(b"compiled again, other bytes", {}))
    assert cache.get(KEY) == ARTIFACT
    assert list((cache.root / "v1" / "tmp").iterdir()) == []


def test_a_record_that_is_not_json_is_refused_before_anything_is_written(cache):
    with pytest.raises(TypeError, match=r"record\.flops: nan is not JSON"):
        cache.put(KEY, Artifact(b"x", {"flops": float("nan")}))
    assert not cache.root.exists()


def test_an_empty_payload_is_a_program(cache):
    cache.put(KEY, Artifact(b"", {}))
    assert cache.get(KEY) == Artifact(b"", {})


def test_a_linked_request_finds_its_program(cache):
    cache.put(KEY, ARTIFACT)
    cache.record_request(request(), KEY)
    assert cache.contains(request())
    assert cache.program_digest(request()) == KEY.digest
    assert cache.get_by_request(request()) == ARTIFACT
    assert not cache.contains(request(target="cpu:2"))
    assert cache.get_by_request(request(target="cpu:2")) is None


def test_a_request_linked_again_finds_the_new_program(cache):
    other = CacheKey.of(text="module { other }")
    cache.put(KEY, ARTIFACT)
    cache.put(other, Artifact(b"other", {}))
    cache.record_request(request(), KEY)
    cache.record_request(request(), other.digest)
    assert cache.get_by_request(request()).payload == b"other"


def test_a_request_whose_program_is_gone_is_not_found(cache):
    cache.record_request(request(), KEY)
    assert not cache.contains(request())
    assert cache.get_by_request(request()) is None


def test_list_joins_programs_with_their_requests(cache):
    cache.put(KEY, ARTIFACT)
    cache.record_request(request(), KEY)
    cache.record_request(request(edited="yes"), KEY)
    (entry,) = cache.list()
    assert entry.program == KEY.digest
    assert set(entry.requests) == {
        request().digest,
        request(edited="yes").digest,
    }
    assert (entry.graph, entry.target) == ("train", "cpu:8")
    assert entry.nbytes > len(ARTIFACT.payload)


def test_list_takes_the_facts_of_a_program_without_requests_from_its_record(cache):
    cache.put(KEY, ARTIFACT)
    (entry,) = cache.list()
    assert (entry.graph, entry.target, entry.requests) == ("train", "cpu:8", ())


def test_list_is_in_the_order_of_last_use(cache):
    keys = [CacheKey.of(text=str(number)) for number in range(3)]
    for age, key in enumerate(keys):
        cache.put(key, ARTIFACT)
        os.utime(cache.root / "v1" / "programs" / key.digest / "payload", (0, 1000 - age))
    cache.get(keys[2])
    assert [entry.program for entry in cache.list()] == [keys[n].digest for n in (2, 0, 1)]


def test_a_target_of_parts_is_listed_as_people_write_it(cache):
    cache.put(KEY, ARTIFACT)
    cache.record_request(request(target={"machine": "v5p", "topology": "4x4x4", "memory": 1}), KEY)
    assert cache.list()[0].target == "v5p:4x4x4"


def test_describe_takes_a_prefix_of_a_program_or_of_a_request(cache):
    cache.put(KEY, ARTIFACT)
    cache.record_request(request(), KEY)
    facts = cache.describe(request().digest[:10])
    assert facts == cache.describe(KEY.digest[:10])
    assert facts["record"] == RECORD
    assert facts["key"] == KEY.to_json()
    assert facts["requests"][0]["digest"] == request().digest


def test_a_prefix_of_several_or_no_digests_is_refused(cache):
    keys = [CacheKey.of(number=number) for number in range(17)]  # two begin with the same digit
    for key in keys:
        cache.put(key, Artifact(b"x", {}))
    starts = [key.digest[0] for key in keys]
    with pytest.raises(CacheError, match=r"matches [2-9] digests"):
        cache.resolve(max(starts, key=starts.count))
    with pytest.raises(CacheError, match="no program or request whose digest starts with zebra"):
        cache.resolve("zebra")


@pytest.mark.parametrize("digest", ["../../../etc", "", "a" * 39, "A" * 40, "a" * 40 + "\n", "a/b"])
def test_only_a_digest_becomes_a_path(cache, digest):
    with pytest.raises(CacheError, match="is not a digest"):
        cache.get(digest)
    with pytest.raises(CacheError, match="is not a digest"):
        cache.record_request(request(), digest)
    with pytest.raises(CacheError, match="is not a digest"):
        cache.lock(digest).__enter__()


def test_a_failure_is_kept_with_its_program_and_log(cache):
    directory = cache.store_failure(KEY, "train/step ../x", "module {}", "no such operation")
    assert directory.parent == cache.root / "v1" / "failures"
    assert (directory / "program.mlir").read_text() == "module {}"
    assert (directory / "log.txt").read_text() == "no such operation"


def test_a_failure_replaces_the_last_of_its_kind(cache):
    cache.store_failure(KEY, "train", "module {}", "first")
    directory = cache.store_failure(KEY, "train", "module {}", "second")
    assert (directory / "log.txt").read_text() == "second"


def test_the_default_store_is_named_by_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("GRAPHTRAIN_CACHE", str(tmp_path / "named"))
    assert default_root() == tmp_path / "named"


def test_the_default_store_is_under_the_current_directory(monkeypatch):
    monkeypatch.delenv("GRAPHTRAIN_CACHE", raising=False)
    assert default_root() == Path("cache")
