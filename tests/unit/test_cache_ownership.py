"""Whose programs are loaded: those of this user, and of caches that the user trusts."""

import json
import os
import pickle
import shutil
import stat
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest
from click.testing import CliRunner

from graphtrain.cache import Cache, CacheWarning
from graphtrain.cache.authentication import TRUSTED_CACHES
from graphtrain.cache.key import CacheKey
from graphtrain.cli.cache import command
from graphtrain.errors import CacheError
from lowering.artifact import Artifact

ROOT = Path(__file__).parents[2]
KEY = CacheKey.of(text="module {}")
REQUEST = CacheKey.of(graph="train")
ARTIFACT = Artifact(b"payload", {"graph": "train"})


@pytest.fixture
def become(tmp_path, monkeypatch):
    """Become a user of this name, with a configuration directory of its own."""

    def become(name: str) -> Path:
        home = tmp_path / "homes" / name
        monkeypatch.setenv("XDG_CONFIG_HOME", str(home))
        return home / "graphtrain" / "cache_secret"

    return become


@pytest.fixture
def of_alice(tmp_path, become) -> Path:
    """A cache that alice filled; this user is bob."""
    become("alice")
    cache = Cache(tmp_path / "cache")
    cache.put(KEY, ARTIFACT)
    cache.record_request(REQUEST, KEY)
    become("bob")
    return cache.root


def command_of(*words: str):
    return CliRunner().invoke(command, list(words))


def entry_of(root: Path) -> Path:
    return root / "v1" / "programs" / KEY.digest


def test_a_program_of_another_user_is_not_loaded_and_the_warning_says_what_to_do(of_alice):
    cache = Cache(of_alice)
    with pytest.warns(CacheWarning, match=rf"not loaded.*graphtrain cache trust {of_alice}") as all:
        assert cache.get(KEY) is None
        assert cache.get_by_request(REQUEST) is None
        assert not cache.contains(REQUEST) and not cache.contains_program(KEY.digest)
        assert cache.stored_programs() == {}
    assert len(all) == 1  # for the whole cache
    assert not cache.explain(REQUEST).hit
    with pytest.raises(CacheError, match="not loaded"):
        cache.program_files(KEY.digest)  # signing it would vouch for it


def test_compiling_replaces_it(of_alice, become):
    cache = Cache(of_alice)
    with pytest.warns(CacheWarning):
        cache.put(KEY, Artifact(b"mine", {}))
    cache.record_request(REQUEST, KEY)
    assert cache.get_by_request(REQUEST) == Artifact(b"mine", {})
    become("alice")
    with pytest.warns(CacheWarning):
        assert Cache(of_alice).get(KEY) is None


def test_verify_reports_it(of_alice, become):
    report = Cache(of_alice).verify()
    assert {problem.kind for problem in report.problems} == {"foreign"} and not report.valid
    assert command_of("verify", "--cache", str(of_alice)).output.startswith("foreign: ")
    become("alice")
    assert Cache(of_alice).verify().valid


def test_a_group_shares_a_cache_by_one_command(of_alice, become):
    assert command_of("trust", str(of_alice)).exit_code == 0
    bob = Cache(of_alice)
    assert bob.get_by_request(REQUEST) == ARTIFACT and bob.verify().valid
    other = CacheKey.of(text="by bob")
    bob.put(other, ARTIFACT)
    become("alice")
    assert command_of("trust", f"{of_alice}/../{of_alice.name}").exit_code == 0
    assert Cache(of_alice).get(other) == ARTIFACT
    assert command_of("trust", "--list").output == f"{of_alice}\n"
    assert command_of("trust", str(of_alice), "--remove").exit_code == 0
    assert command_of("trust", "--list").output == "no directory is trusted\n"
    without = command_of("trust")
    assert without.exit_code == 2 and "give the DIRECTORY of a cache" in without.output
    with pytest.warns(CacheWarning):
        assert Cache(of_alice).get(other) is None


def test_the_winner_of_a_search_of_another_user_is_used_only_from_a_trusted_cache(of_alice, become):
    """It names files of rules, and decides which programs run."""
    become("alice")
    Cache(of_alice).store_search(REQUEST, {"rules": ["tensor"]})
    assert Cache(of_alice).stored_search(REQUEST) == {"rules": ["tensor"]}
    become("bob")
    with pytest.warns(CacheWarning, match="this user did not store it here"):
        assert Cache(of_alice).stored_search(REQUEST) is None
    (path,) = (of_alice / "v1" / "searches").iterdir()
    other = CacheKey.of(graph="search")
    path.rename(path.with_name(f"{other.digest}.json"))
    become("alice")
    with pytest.warns(CacheWarning, match="this user did not store it here"):
        assert Cache(of_alice).stored_search(other) is None  # the code is of another key
    become("bob")
    assert command_of("trust", str(of_alice)).exit_code == 0
    assert Cache(of_alice).stored_search(other) == {"rules": ["tensor"]}


def test_a_variable_trusts_too_and_then_no_secret_is_needed(of_alice, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))  # cannot be created
    monkeypatch.setenv(TRUSTED_CACHES, f"/elsewhere:{of_alice}")
    cache = Cache(of_alice)
    assert cache.get_by_request(REQUEST) == ARTIFACT
    other = CacheKey.of(text="without a secret")
    cache.put(other, ARTIFACT)
    assert cache.get(other) == ARTIFACT


def test_without_a_writable_configuration_directory_storing_says_what_to_set(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    with pytest.raises(CacheError, match=rf"cannot write .*XDG_CONFIG_HOME.*{TRUSTED_CACHES}"):
        Cache(tmp_path / "cache").put(KEY, ARTIFACT)


def test_a_user_without_a_home_is_told(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError))
    with pytest.raises(CacheError, match="no home directory; set XDG_CONFIG_HOME"):
        Cache(tmp_path / "cache").put(KEY, ARTIFACT)


def test_a_code_covers_record_payload_and_digest(of_alice, become):
    become("alice")
    entry = entry_of(of_alice)
    code = (entry / "code").read_bytes()
    evil = CacheKey.of(text="evil")
    (of_alice / "v1" / "programs" / evil.digest).mkdir()
    for path in entry.iterdir():
        shutil.copy(path, of_alice / "v1" / "programs" / evil.digest)
    with pytest.warns(CacheWarning, match="belongs to another program"):
        assert Cache(of_alice).get(evil) is None
    forged = make_poison(of_alice.parent / "forged", KEY, Path("/nowhere"))
    for name in ("record.json", "payload"):
        shutil.copy(forged / "v1" / "programs" / KEY.digest / name, entry)
    assert (entry / "code").read_bytes() == code
    with pytest.warns(CacheWarning, match="not loaded"):
        assert Cache(of_alice).get(KEY) is None


def test_a_request_cannot_be_led_to_another_program_of_the_same_user(of_alice, become):
    become("alice")
    cache, other = Cache(of_alice), CacheKey.of(text="other")
    cache.put(other, Artifact(b"other", {}))
    path = of_alice / "v1" / "requests" / f"{REQUEST.digest}.json"
    path.write_text(path.read_text().replace(KEY.digest, other.digest))
    with pytest.warns(CacheWarning, match="not loaded"):
        assert cache.get_by_request(REQUEST) is None


class Poison:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        return os.system, (f"touch {self.file}",)


def make_poison(root: Path, key: CacheKey, file: Path, config: str = "attacker") -> Path:
    """A cache made by another user, whose program creates a file when it is unpickled."""
    mine, theirs = os.environ["XDG_CONFIG_HOME"], str(root.parent / config)
    os.environ["XDG_CONFIG_HOME"] = theirs
    try:
        cache = Cache(root)
        cache.put(key, Artifact(pickle.dumps(Poison(file)), {"graph": "train"}))
    finally:
        os.environ["XDG_CONFIG_HOME"] = mine
    return root


def test_the_secret_is_private_and_one_however_many_processes_ask_first(tmp_path, become):
    secret = become("carol")
    script = (
        "from graphtrain.cache.authentication import EntryAuthenticator as Of; from pathlib import "
        "Path; input(); print(Of(Path('cache')).code('message'))"
    )
    processes = [python(script, tmp_path) for _ in range(6)]
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    assert len({process.communicate()[0] for process in processes}) == 1
    assert {process.returncode for process in processes} == {0}
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert [path.name for path in secret.parent.iterdir()] == ["cache_secret"]


def python(script: str, directory: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


@pytest.mark.parametrize("text", [b"", b"abc", b"\xff" * 64, b"0" * 63])
def test_a_damaged_secret_is_an_error_that_names_it(tmp_path, become, text):
    secret = become("carol")
    secret.parent.mkdir(parents=True)
    secret.write_bytes(text)
    secret.chmod(0o600)
    with pytest.raises(CacheError, match=rf"{secret} is damaged"):
        Cache(tmp_path / "cache").put(KEY, ARTIFACT)


def test_a_secret_that_others_can_read_is_refused(of_alice, become):
    become("alice").chmod(0o640)
    with pytest.raises(CacheError, match=r"other users can read .*mode 640"):
        Cache(of_alice).get(KEY)


@pytest.mark.parametrize("directory", ["", "v1", "v1/requests"])
def test_a_cache_that_every_user_can_write_is_refused_until_it_is_trusted(
    of_alice, become, directory
):
    become("alice")
    (of_alice / directory).chmod(0o777)
    with pytest.raises(CacheError, match=rf"every user can write to .*mode 777.*trust {of_alice}"):
        Cache(of_alice)
    command_of("trust", str(of_alice))
    assert Cache(of_alice).get(KEY) == ARTIFACT


def test_a_cache_that_a_group_can_write_is_refused_unless_it_is_the_users_own(of_alice):
    of_alice.chmod(0o775)
    os.chown(of_alice, -1, os.getegid())
    Cache(of_alice)  # root's own group
    if os.geteuid() == 0:
        os.chown(of_alice, -1, 54321)
        with pytest.raises(CacheError, match="the group 54321 can write to"):
            Cache(of_alice)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_a_cache_of_another_user_is_refused_except_to_root():
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        root = Path(directory) / "cache"
        root.mkdir()
        os.chown(root, 54321, 54321)
        Cache(root)
        os.seteuid(54322)
        try:
            with pytest.raises(CacheError, match=r"cache belongs to another user \(54321\)"):
                Cache(root)
        finally:
            os.seteuid(0)


def test_links_inside_a_cache_are_refused_so_that_gc_follows_none(of_alice, tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").touch()
    (of_alice / "v1" / "quarantine").symlink_to(tmp_path / "precious")
    result = command_of("gc", "--cache", str(of_alice))
    assert isinstance(result.exception, CacheError) and "symbolic link" in str(result.exception)
    assert (tmp_path / "precious" / "file").exists()


@pytest.mark.parametrize("name", ["record.json", "payload", "code"])
def test_a_named_pipe_in_place_of_a_file_is_damage_and_no_wait(of_alice, become, name):
    become("alice")
    (entry_of(of_alice) / name).unlink()
    os.mkfifo(entry_of(of_alice) / name)
    with pytest.warns(CacheWarning):
        assert Cache(of_alice).get(KEY) is None


HOSTILE = {
    "deep": b'{"schema":1,"key":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "digits": b'{"schema":1,"key":' + b"9" * 5_000 + b"}",
    "list": b"[]",
    "no fields": b'{"schema":1}',
    "surrogate": b'{"schema":1,"sha256":"\\ud800"}',
    "bytes": b"\xff\xfe\x00",
    "fields": json.dumps(
        {"schema": 1, "key": [], "payload": 5, "record": None, "created": {}, "sha256": 1}
    ).encode(),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_record_of_a_failure_is_none(tmp_path, kind):
    cache = Cache(tmp_path / "cache")
    directory = cache.store_failure(REQUEST, "train", "", "", {"error": "too large", "kind": "x"})
    assert cache.stored_failure(REQUEST, "train").error == "too large"
    (directory / "failure.json").write_bytes(HOSTILE[kind])
    assert cache.stored_failure(REQUEST, "train") is None
    (directory / "failure.json").unlink()
    os.mkfifo(directory / "failure.json")
    assert cache.stored_failure(REQUEST, "train") is None


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("trusted", [False, True])
def test_hostile_json_is_damage_whoever_is_trusted(of_alice, monkeypatch, kind, trusted):
    if trusted:
        monkeypatch.setenv(TRUSTED_CACHES, str(of_alice))
    (entry_of(of_alice) / "record.json").write_bytes(HOSTILE[kind])
    (of_alice / "v1" / "requests" / f"{REQUEST.digest}.json").write_bytes(HOSTILE[kind])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CacheWarning)
        cache = Cache(of_alice)
        assert len(cache.verify().problems) == 2
        assert not cache.list() and not cache.explain(REQUEST).hit
        assert cache.get_by_request(REQUEST) is None and cache.get(KEY) is None
        cache.gc()
