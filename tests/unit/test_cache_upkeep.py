import os
import time
from importlib import metadata

import pytest

from graphtrain.cache import Cache, collect, stored_requests
from graphtrain.cache.key import CacheKey
from graphtrain.cache.sizes import format_size, parse_size
from lowering.artifact import Artifact

KEYS = [CacheKey.of(number=number) for number in range(4)]
REQUESTS = [CacheKey.of(graph="train", number=number) for number in range(4)]
DAY = 86_400


@pytest.fixture
def cache(tmp_path):
    """Four programs of 10,000 bytes and a record, used now, one, two and three days ago."""
    cache = Cache(tmp_path)
    for number, (key, request) in enumerate(zip(KEYS, REQUESTS, strict=True)):
        cache.put(key, Artifact(bytes(10_000), {}))
        cache.record_request(request, key)
        used = time.time() - number * DAY
        os.utime(tmp_path / "v1" / "programs" / key.digest / "payload", (used, used))
    return cache


def stored(cache):
    return [number for number, request in enumerate(REQUESTS) if cache.contains(request)]


def test_gc_without_limits_keeps_every_program(cache):
    assert cache.gc().removed == ()
    assert stored(cache) == [0, 1, 2, 3]


def test_gc_removes_what_was_used_longest_ago_until_the_rest_fits(cache):
    done = cache.gc(max_bytes=25_000)
    assert stored(cache) == [0, 1]
    assert [entry.program for entry in done.removed] == [KEYS[3].digest, KEYS[2].digest]
    assert done.remaining_bytes == sum(entry.nbytes for entry in cache.list())
    assert done.removed_bytes > 20_000


def test_gc_removes_what_is_too_old(cache):
    cache.gc(max_age_days=1.5)
    assert stored(cache) == [0, 1]


def test_gc_keeps_what_it_is_told_to_by_program_or_request(cache):
    cache.gc(max_bytes=0, keep=[KEYS[3].digest, REQUESTS[1].digest])
    assert stored(cache) == [1, 3]


def test_gc_removes_the_requests_of_what_it_removes(cache):
    cache.gc(max_bytes=0)
    assert list((cache.root / "v1" / "requests").iterdir()) == []
    assert list((cache.root / "v1" / "programs").iterdir()) == []
    assert list((cache.root / "v1" / "tmp").iterdir()) == []


def test_what_is_pinned_stays_until_it_is_not(cache):
    assert cache.pin(KEYS[2].digest[:10]) == KEYS[2].digest
    cache.gc(max_bytes=0)
    assert stored(cache) == [2] and cache.pinned() == {KEYS[2].digest}
    cache.unpin(KEYS[2].digest)
    cache.gc(max_bytes=0)
    assert stored(cache) == []


def test_gc_removes_what_other_versions_made(tmp_path):
    cache = Cache(tmp_path)
    made = {"here": metadata.version("jax"), "elsewhere": "0.0.1"}
    keys = {
        name: CacheKey.of(toolchain={"versions": {"jax": jax}, "environment": {}})
        for name, jax in made.items()
    }
    for key in (*keys.values(), KEYS[0]):
        cache.put(key, Artifact(b"payload", {}))
    removed = cache.gc(other_toolchains=True).removed
    assert [entry.program for entry in removed] == [keys["elsewhere"].digest]


def test_what_other_versions_made_makes_room_for_what_is_of_use(tmp_path):
    cache = Cache(tmp_path)
    foreign = CacheKey.of(toolchain={"versions": {"jax": "0.0.1"}, "environment": {}})
    for days, key in enumerate((foreign, KEYS[0])):  # what is of use was used longer ago
        cache.put(key, Artifact(bytes(10_000), {}))
        used = time.time() - days * DAY
        os.utime(tmp_path / "v1" / "programs" / key.digest / "payload", (used, used))
    removed = cache.gc(max_bytes=15_000, other_toolchains=True).removed
    assert [entry.program for entry in removed] == [foreign.digest]


def test_use_saves_a_program_from_gc(cache):
    cache.get_by_request(REQUESTS[3])
    cache.gc(max_bytes=25_000)
    assert stored(cache) == [0, 3]


def test_a_program_locked_by_its_request_stays(cache):
    with cache.lock(REQUESTS[3]):
        planned = cache.gc(max_bytes=0, dry_run=True)
        assert stored(cache) == [0, 1, 2, 3]
        done = cache.gc(max_bytes=0)
    assert stored(cache) == [3]
    assert len(done.leased) == 1
    assert planned == done


def test_gc_empties_quarantine_and_removes_old_failures(cache):
    payload = cache.root / "v1" / "programs" / KEYS[0].digest / "payload"
    payload.write_bytes(b"")
    cache.verify(repair=True)
    failure = cache.store_failure(KEYS[0], "train", "", "")
    os.utime(failure, (0, 0))
    done = cache.gc(max_age_days=100)
    assert done.leftovers == 3  # the program, its request, the failure
    assert list((cache.root / "v1" / "quarantine").iterdir()) == []
    assert not failure.exists()


def test_gc_keeps_the_files_of_a_living_process(cache):
    living = cache.root / "v1" / "tmp" / f"{os.uname().nodename}.{os.getpid()}.0a0b0c"
    living.mkdir()
    os.utime(living, (0, time.time() - 5000))
    assert cache.gc().leftovers == 0
    os.utime(living, (0, time.time() - 2 * DAY))
    assert cache.gc().leftovers == 1


def test_gc_of_no_store_makes_none(tmp_path):
    done = Cache(tmp_path / "none").gc(max_bytes=0)
    assert (done.removed, done.leftovers, done.remaining_bytes) == ((), 0, 0)
    assert not (tmp_path / "none").exists()


def test_verify_counts_what_is_sound(cache):
    report = cache.verify()
    assert (report.programs, report.requests, report.unreferenced_programs) == (4, 4, ())
    assert report.valid


def test_verify_finds_damage_dangling_requests_and_orphans(cache):
    programs, requests = cache.root / "v1" / "programs", cache.root / "v1" / "requests"
    (programs / KEYS[0].digest / "payload").write_bytes(bytes(9_999) + b"x")
    cache.record_request(REQUESTS[1], CacheKey.of(text="never stored"))
    (requests / f"{REQUESTS[2].digest}.json").write_text("{")
    report = cache.verify()
    kinds = {(problem.path.stem, problem.kind) for problem in report.problems}
    assert kinds == {
        (KEYS[0].digest, "damaged"),
        (REQUESTS[1].digest, "dangling"),
        (REQUESTS[2].digest, "damaged"),
    }
    assert set(report.unreferenced_programs) == {KEYS[1].digest, KEYS[2].digest}
    assert not report.valid


def test_repair_leaves_a_sound_store(cache):
    (cache.root / "v1" / "programs" / KEYS[0].digest / "payload").unlink()
    (cache.root / "v1" / "requests" / f"{REQUESTS[2].digest}.json").write_text("{")
    report = cache.verify(repair=True)
    assert report.valid
    assert len(report.problems) == 3  # the request of the first program leads nowhere now
    assert cache.verify().problems == ()
    assert stored(cache) == [1, 3]


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (999_960, "1.0 MB"), (18_700_000, "18.7 MB")],
)
def test_sizes_are_readable(nbytes, text):
    assert format_size(nbytes) == text


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("500", 500), ("500B", 500), ("20GB", 20 * 10**9), ("1.5 g", 1_500_000_000), (" 2kb ", 2000)],
)
def test_sizes_are_parsed(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GB", "-1", "1.2.3", "5 parsecs", "1e3", "1GiB"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="is not a size; use a form such as 500MB"):
        parse_size(text)


def test_verify_does_not_report_what_gc_removes_meanwhile(cache, monkeypatch):
    read = stored_requests.read

    def read_and_collect(path):
        request = read(path)
        cache.gc(max_bytes=0)
        return request

    monkeypatch.setattr(stored_requests, "read", read_and_collect)
    assert cache.verify().valid and stored(cache) == []


def test_at_no_moment_of_gc_is_a_request_without_its_program(cache, monkeypatch):
    remove, reports = collect.remove_directory, []

    def remove_and_verify(*arguments):
        remove(*arguments)
        reports.append(cache.verify())

    monkeypatch.setattr(collect, "remove_directory", remove_and_verify)
    cache.gc(max_bytes=0)
    assert len(reports) == len(KEYS) and all(report.valid for report in reports)
