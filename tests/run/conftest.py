"""Text and compiled programs, made once for all tests of this folder."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from places import CUBE, Place, furnish
from unoptimized import XLA_FLAGS

from lowering.machine import leases
from lowering.machine.leases import Lease

Once = Callable[[str, Callable[[Path], None]], Path]


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory, testrun_uid: str) -> Once:
    """Makes a directory once, whichever worker of the tests is first to ask for it."""
    shared = tmp_path_factory.getbasetemp().parent / f"shared-{testrun_uid}"
    shared.mkdir(exist_ok=True)

    def make(name: str, fill: Callable[[Path], None]) -> Path:
        path = shared / name
        with leases.hold(Lease(shared / f"{name}.lease")):
            if not path.exists():
                fill(path.with_suffix(".part"))
                path.with_suffix(".part").rename(path)
        return path

    return make


@pytest.fixture(scope="session")
def corpus(once: Once) -> Path:
    """Real text as bytes, prepared by the command."""

    def fill(path: Path) -> None:
        path.mkdir()
        place = Place(path, path / "unused")
        place.command("data", "sample", "text.jsonl", "--megabytes", "0.3")
        words = ["--output", "data", "--tokenizer", "bytes", "--validation", "0.1"]
        place.command("data", "prepare", "text.jsonl", *words)

    return once("corpus", fill) / "data"


@pytest.fixture(scope="session")
def compiled(once: Once, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the programs of the configuration, on cpu:1 and on 8 devices; what runs add to
    it is seen by the tests of one worker."""

    def fill(path: Path) -> None:
        path.mkdir()
        furnish(path / "here", corpus)
        place = Place(path / "here", path / "cache")
        options: Sequence[Sequence[str]] = [], CUBE
        for words in options:
            place.command("compile", "config.toml", *words)

    cache = tmp_path_factory.mktemp("compiled") / "cache"
    shutil.copytree(once("compiled", fill) / "cache", cache)
    return cache


@pytest.fixture
def place(tmp_path: Path, corpus: Path, compiled: Path) -> Place:
    """A fresh directory with the shared, filled store."""
    furnish(tmp_path / "here", corpus)
    return Place(tmp_path / "here", compiled)


@pytest.fixture
def cold(tmp_path: Path, corpus: Path) -> Place:
    """A fresh directory with a store of its own, empty."""
    furnish(tmp_path / "here", corpus)
    return Place(tmp_path / "here", tmp_path / "cache")


@pytest.fixture
def compiled_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA:CPU optimizes nothing, for a store of its own: what is stored has the same parts."""
    monkeypatch.setenv("XLA_FLAGS", XLA_FLAGS)
