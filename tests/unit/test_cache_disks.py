import shutil
import subprocess

import pytest

from graphtrain.cache import Cache, CacheWarning
from graphtrain.errors import CacheError
from graphtrain.key import CacheKey
from lowering.artifact import Artifact

KEY = CacheKey.of(text="module {}")
REQUEST = CacheKey.of(graph="train")
SMALL = Artifact(b"small", {})
LARGE = Artifact(bytes(1_000_000), {})


def mount(*arguments):
    if shutil.which("mount") is None:
        pytest.skip("there is no mount command")
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")


@pytest.fixture
def small_disk(tmp_path):
    mount("-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path))
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.fixture
def read_only(tmp_path):
    """A function that makes a directory read-only, for root too."""
    mounted = []

    def freeze(path):
        mount("--bind", str(path), str(path))
        mounted.append(str(path))
        mount("-o", "remount,ro,bind", str(path))

    yield freeze
    for path in mounted:
        subprocess.run(["umount", path], check=True)


def test_a_full_disk_says_what_is_needed_and_leaves_nothing(small_disk):
    cache = Cache(small_disk)
    with pytest.raises(CacheError, match=r"cannot write .*1\.0 MB needed.*graphtrain cache gc"):
        cache.put(KEY, LARGE)
    assert cache.get(KEY) is None
    assert list((small_disk / "v1" / "tmp").iterdir()) == []
    cache.put(KEY, SMALL)
    assert cache.get(KEY) == SMALL


def test_a_full_disk_keeps_the_old_answer_of_a_request(small_disk):
    cache = Cache(small_disk)
    cache.put(KEY, SMALL)
    cache.link(REQUEST, KEY)
    with pytest.raises(OSError, match="No space left"), open(small_disk / "rest", "wb") as file:
        while True:
            file.write(bytes(4096))
    with pytest.raises(CacheError, match="No space left"):
        cache.link(REQUEST, CacheKey.of(text="other"))
    assert cache.find(REQUEST) == SMALL
    assert list((small_disk / "v1" / "tmp").iterdir()) == []


def test_a_full_disk_keeps_no_half_of_a_failure(small_disk):
    cache = Cache(small_disk)
    with pytest.raises(CacheError, match="No space left"):
        cache.store_failure(KEY, "train", "x" * 1_000_000, "log")
    assert list((small_disk / "v1" / "failures").iterdir()) == []


def test_a_read_only_store_is_read(tmp_path, read_only):
    cache = Cache(tmp_path)
    cache.put(KEY, SMALL)
    cache.link(REQUEST, KEY)
    read_only(tmp_path)
    assert cache.find(REQUEST) == SMALL
    assert cache.has(REQUEST)
    assert len(cache.list()) == 1
    assert cache.explain(REQUEST).hit
    assert cache.verify().sound


def test_a_read_only_store_refuses_every_write_and_says_what_to_do(tmp_path, read_only):
    cache = Cache(tmp_path)
    cache.put(KEY, SMALL)
    read_only(tmp_path)
    writes = {
        "put": lambda: cache.put(CacheKey.of(text="other"), SMALL),
        "link": lambda: cache.link(REQUEST, KEY),
        "lock": lambda: cache.lock(KEY).__enter__(),
        "gc": lambda: cache.gc(max_bytes=0),
        "store_failure": lambda: cache.store_failure(KEY, "train", "", ""),
    }
    for write in writes.values():
        with pytest.raises(CacheError, match=r"cannot write .*Read-only file system.*--cache DIR"):
            write()
    assert cache.get(KEY) == SMALL


def test_damage_in_a_read_only_store_is_noticed_and_left_there(tmp_path, read_only):
    cache = Cache(tmp_path)
    cache.put(KEY, SMALL)
    payload = tmp_path / "v1" / "programs" / KEY.digest / "payload"
    payload.write_bytes(b"smaLl")
    read_only(tmp_path)
    with pytest.warns(CacheWarning, match="left there, since it cannot be moved"):
        assert cache.get(KEY) is None
    assert payload.read_bytes() == b"smaLl"
    assert not cache.verify(repair=True).sound


def test_a_store_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match=r"cannot write .*Not a directory"):
        Cache(tmp_path / "file").put(KEY, SMALL)
