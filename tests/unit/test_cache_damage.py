import json

import pytest

from graphtrain.cache import Cache, CacheWarning
from graphtrain.cache.key import CacheKey
from lowering.artifact import Artifact

KEY = CacheKey.of(text="module {}")
REQUEST = CacheKey.of(graph="train", program={"layers": 2})
ARTIFACT = Artifact(bytes(range(256)) * 20, {"mesh": {"data": 2}})


@pytest.fixture
def cache(tmp_path):
    cache = Cache(tmp_path / "store")
    cache.put(KEY, ARTIFACT)
    cache.record_request(REQUEST, KEY)
    return cache


@pytest.fixture
def entry(cache):
    return cache.root / "v1" / "programs" / KEY.digest


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def edit_record(entry, **changes):
    record = json.loads((entry / "record.json").read_text())
    (entry / "record.json").write_text(json.dumps(record | changes))


DAMAGES = {
    "payload does not match its checksum": lambda entry: flip(entry / "payload", 2000),
    "payload has 100 bytes instead of 5120": lambda entry: (entry / "payload").write_bytes(
        b"x" * 100
    ),
    "payload is missing": lambda entry: (entry / "payload").unlink(),
    "record.json is missing": lambda entry: (entry / "record.json").unlink(),
    "record.json is not JSON": lambda entry: (entry / "record.json").write_text('{"schema": 1,'),
    "record.json is not a JSON object": lambda entry: (entry / "record.json").write_text("[]"),
    "record.json does not match its checksum": lambda entry: edit_record(
        entry, record={"mesh": {"data": 4}}
    ),
}


@pytest.mark.parametrize("reason", DAMAGES)
def test_damage_is_noticed_and_set_aside_and_compiled_again(cache, entry, reason):
    DAMAGES[reason](entry)
    with pytest.warns(CacheWarning, match=f"is damaged: .*{reason}.*moved to"):
        assert cache.get_by_request(REQUEST) is None
    (place,) = (cache.root / "v1" / "quarantine").iterdir()
    assert reason in (place / "reason.txt").read_text()
    assert (place / KEY.digest).is_dir()
    cache.put(KEY, ARTIFACT)
    assert cache.get_by_request(REQUEST) == ARTIFACT


def test_every_byte_of_a_record_is_covered(cache, entry):
    whole = (entry / "record.json").read_bytes()
    for position in range(0, len(whole), 7):
        (entry / "record.json").write_bytes(whole)
        flip(entry / "record.json", position)
        try:
            same = json.loads((entry / "record.json").read_bytes()) == json.loads(whole)
        except ValueError:
            same = False
        assert cache.contains(REQUEST) is same  # a space can become another without harm


def test_put_replaces_a_damaged_entry(cache, entry):
    flip(entry / "payload", 0)
    with pytest.warns(CacheWarning, match="is damaged"):
        cache.put(KEY, Artifact(b"compiled again", {}))
    assert cache.get(KEY) == Artifact(b"compiled again", {})


def test_an_entry_under_the_digest_of_another_is_not_used(cache, entry):
    other = CacheKey.of(text="module { other }")
    entry.rename(entry.with_name(other.digest))
    with pytest.warns(CacheWarning, match=r"record.json belongs to another program"):
        assert cache.get(other) is None


def test_another_version_is_absent_but_stays_where_it_is(cache, entry):
    edit_record(entry, schema=2)
    with pytest.warns(CacheWarning, match=r"ignored: record.json has schema 2.*reads 1"):
        assert cache.get(KEY) is None
    assert not cache.contains(REQUEST)
    assert (entry / "payload").exists()


def test_put_moves_another_version_to_quarantine(cache, entry):
    edit_record(entry, schema=2)
    with pytest.warns(CacheWarning, match="schema 2"):
        cache.put(KEY, ARTIFACT)
    assert cache.get(KEY) == ARTIFACT
    assert len(list((cache.root / "v1" / "quarantine").iterdir())) == 1


BAD_REQUESTS = {
    "request is not JSON": b"\xff\x00",
    "request has schema 7": b'{"schema": 7}',
    "request has no valid graph": b'{"schema": 1, "graph": "train", "program": "../../payload"}',
}


@pytest.mark.parametrize("reason", BAD_REQUESTS)
def test_a_damaged_request_is_absent_until_it_is_linked_again(cache, reason):
    path = cache.root / "v1" / "requests" / f"{REQUEST.digest}.json"
    path.write_bytes(BAD_REQUESTS[reason])
    with pytest.warns(CacheWarning, match=f"ignored: {reason}"):
        assert cache.get_by_request(REQUEST) is None
    cache.record_request(REQUEST, KEY)
    assert cache.get_by_request(REQUEST) == ARTIFACT


def test_a_request_under_the_digest_of_another_is_not_used(cache):
    other = CacheKey.of(graph="train", program={"layers": 4})
    requests = cache.root / "v1" / "requests"
    (requests / f"{REQUEST.digest}.json").rename(requests / f"{other.digest}.json")
    with pytest.warns(CacheWarning, match="the request's contents do not match its digest"):
        assert cache.get_by_request(other) is None


def test_files_that_are_no_entries_are_ignored(cache, entry):
    (entry.parent / "notes.txt").write_text("")
    (cache.root / "v1" / "requests" / "README").write_text("")
    assert [item.program for item in cache.list()] == [KEY.digest]
    assert cache.verify().valid
