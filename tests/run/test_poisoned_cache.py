"""A cache that comes with a cloned folder: nothing in it runs."""

import json
import os
import pickle
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from places import Place

from graphtrain.cache import Cache
from graphtrain.cache.key import CacheKey
from lowering.artifact import Artifact


@dataclass
class Poison:
    """Creates a file when it is unpickled."""

    file: Path

    def __reduce__(self):
        return os.mkdir, (str(self.file),)


@pytest.fixture
def owned(tmp_path) -> Path:
    """The file that the programs of an attacker create."""
    return tmp_path / "owned"


@pytest.fixture
def poisoned(place, owned, tmp_path, monkeypatch) -> Place:
    """The place with a cache in which an attacker has replaced every program."""
    mine, theirs = Cache(place.cache), tmp_path / "theirs"
    with monkeypatch.context() as attacker:
        attacker.setenv("XDG_CONFIG_HOME", str(tmp_path / "attacker"))
        for path in (mine.root / "v1" / "requests").iterdir():
            stored = json.loads(path.read_bytes())
            described = mine.describe(stored["program"])
            key = CacheKey.from_json(described["key"])
            Cache(theirs).put(key, Artifact(pickle.dumps(Poison(owned)), described["record"]))
            request = CacheKey.from_json(stored["parts"])
            Cache(theirs).record_request(request, key, graph=stored["graph"])
    return replace(place, cache=theirs)


def test_a_poisoned_cache_runs_nothing_and_run_says_why(poisoned, owned):
    _, err = poisoned.command("run", "config.toml", status=3)
    assert "not loaded, because a program is code" in err
    assert f"graphtrain cache trust {poisoned.cache}" in err
    assert "not stored here by this user" in err
    assert not owned.exists()
    out, _ = poisoned.command("cache", "verify", status=2)
    assert out.count("foreign: ") == len(out.splitlines()) > 3
    poisoned.command("compile", "config.toml")
    poisoned.command("run", "config.toml")
    assert not owned.exists() and poisoned.curve()


def test_the_same_cache_runs_what_it_holds_once_it_is_trusted(poisoned, owned, monkeypatch):
    """So the test above would see it."""
    monkeypatch.setenv("GRAPHTRAIN_TRUSTED_CACHES", str(poisoned.cache))
    process = poisoned.start("run", "config.toml")
    process.communicate()
    assert owned.exists()
