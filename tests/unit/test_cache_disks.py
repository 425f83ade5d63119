import errno
import os
import shutil
import stat
import subprocess

import pytest

from graphtrain.cache import Cache, CacheWarning
from graphtrain.cache.key import CacheKey
from graphtrain.errors import CacheError
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
    mount("-t", "tmpfs", "-o", "size=256k,mode=700", "tmpfs", str(tmp_path))
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
    cache.record_request(REQUEST, KEY)
    with pytest.raises(OSError, match="No space left"), open(small_disk / "rest", "wb") as file:
        while True:
            file.write(bytes(4096))
    with pytest.raises(CacheError, match="No space left"):
        cache.record_request(REQUEST, CacheKey.of(text="other"))
    assert cache.get_by_request(REQUEST) == SMALL
    assert list((small_disk / "v1" / "tmp").iterdir()) == []


def test_a_full_disk_keeps_no_half_of_a_failure(small_disk):
    cache = Cache(small_disk)
    with pytest.raises(CacheError, match="No space left"):
        cache.store_failure(KEY, "train", "x" * 1_000_000, "log")
    assert list((small_disk / "v1" / "failures").iterdir()) == []


def test_a_read_only_store_is_read(tmp_path, read_only):
    cache = Cache(tmp_path)
    cache.put(KEY, SMALL)
    cache.record_request(REQUEST, KEY)
    read_only(tmp_path)
    assert cache.get_by_request(REQUEST) == SMALL
    assert cache.contains(REQUEST)
    assert len(cache.list()) == 1
    assert cache.explain(REQUEST).hit
    assert cache.verify().valid


def test_a_read_only_store_refuses_every_write_and_says_what_to_do(tmp_path, read_only):
    cache = Cache(tmp_path)
    cache.put(KEY, SMALL)
    read_only(tmp_path)
    writes = {
        "put": lambda: cache.put(CacheKey.of(text="other"), SMALL),
        "link": lambda: cache.record_request(REQUEST, KEY),
        "lock": lambda: cache.lock(KEY).__enter__(),
        "store_failure": lambda: cache.store_failure(KEY, "train", "", ""),
    }
    for write in writes.values():
        with pytest.raises(CacheError, match=r"cannot write .*Read-only file system.*--cache DIR"):
            write()
    assert cache.get(KEY) == SMALL


def test_gc_of_a_read_only_store_says_what_it_could_not_remove(tmp_path, read_only):
    cache = Cache(tmp_path)
    cache.put(KEY, SMALL)
    read_only(tmp_path)
    assert cache.gc(max_bytes=100_000).removed == ()  # nothing to do
    with pytest.raises(CacheError, match=rf"cannot remove .*{KEY.digest}: Read-only file system"):
        cache.gc(max_bytes=0)
    assert cache.get(KEY) == SMALL


def refuse(number):
    def function(*_, **__):
        raise OSError(number, os.strerror(number))

    return function


@pytest.mark.parametrize("command", ["list", "gc"])
def test_a_directory_that_cannot_be_read_is_an_error_with_its_name(tmp_path, monkeypatch, command):
    cache = Cache(tmp_path)
    cache.put(KEY, SMALL)
    monkeypatch.setattr(os, "listdir", refuse(errno.EACCES))
    with pytest.raises(CacheError, match=rf"cannot read {tmp_path}/v1/.*: Permission denied"):
        getattr(cache, command)()


@pytest.mark.parametrize(
    ("refused", "read"), [("builtins.open", "stored_programs"), ("os.stat", "list")]
)
def test_what_another_host_removes_meanwhile_is_not_listed(tmp_path, monkeypatch, refused, read):
    """Over NFS it is stale; every other error of the disk is told."""
    cache = Cache(tmp_path)
    cache.put(KEY, SMALL)
    cache.record_request(REQUEST, KEY)
    with monkeypatch.context() as patched:
        patched.setattr(refused, refuse(errno.ESTALE))
        assert not getattr(cache, read)()
    assert getattr(cache, read)()
    monkeypatch.setattr(refused, refuse(errno.EIO))
    with pytest.raises(CacheError, match=r"cannot read .*: Input/output error"):
        getattr(cache, read)()


def test_a_file_system_without_fsync_of_directories_will_do(tmp_path, monkeypatch):
    fsync = os.fsync

    def of_files(descriptor):
        is_directory = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        return refuse(errno.EINVAL)() if is_directory else fsync(descriptor)

    monkeypatch.setattr(os, "fsync", of_files)
    cache = Cache(tmp_path)
    cache.put(KEY, SMALL)
    cache.record_request(REQUEST, KEY)
    assert cache.get_by_request(REQUEST) == SMALL


def test_damage_in_a_read_only_store_is_noticed_and_left_there(tmp_path, read_only):
    cache = Cache(tmp_path)
    cache.put(KEY, SMALL)
    payload = tmp_path / "v1" / "programs" / KEY.digest / "payload"
    payload.write_bytes(b"smaLl")
    read_only(tmp_path)
    with pytest.warns(CacheWarning, match="it could not be moved to quarantine"):
        assert cache.get(KEY) is None
    assert payload.read_bytes() == b"smaLl"
    assert not cache.verify(repair=True).valid


def test_a_store_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match=r"cannot write .*Not a directory"):
        Cache(tmp_path / "file").put(KEY, SMALL)
