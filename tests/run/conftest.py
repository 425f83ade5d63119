"""Text and compiled programs, made once for all tests of this folder."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from places import CUBE, Place, furnish
from unoptimized import XLA_FLAGS


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real text as bytes, prepared by the command."""
    path = tmp_path_factory.mktemp("corpus")
    place = Place(path, path / "unused")
    place.command("data", "sample", "text.jsonl", "--megabytes", "0.3")
    words = ["--output", "data", "--tokenizer", "bytes", "--validation", "0.1"]
    place.command("data", "prepare", "text.jsonl", *words)
    return path / "data"


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A store with the programs of the configuration, on cpu:1 and on 8 devices."""
    path = tmp_path_factory.mktemp("compiled")
    furnish(path / "here", corpus)
    place = Place(path / "here", path / "cache")
    options: Sequence[Sequence[str]] = [], CUBE
    for words in options:
        place.command("compile", "config.toml", *words)
    return path / "cache"


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
