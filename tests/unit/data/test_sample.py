import ast
import json

import pytest

from graphtrain.data.samples import text
from graphtrain.data.samples.text import write_sample
from graphtrain.errors import DataError

MODULE = '''"""Docs é."""


class A:
    """Of A.

    More."""  # x

    def f(self): "one"; return "é"
'''


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def small_library(tmp_path, monkeypatch):
    """A standard library of few files, without the topics of pydoc."""
    root = tmp_path / "library"
    for name, data in {
        "b.py": MODULE.encode(),
        "a.py": b"x = 1\n",
        "test/c.py": b"y = 1\n",
        "latin.py": b"# \xe9\n",
        "future.py": b"match = = 3\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    monkeypatch.setattr(text.sysconfig, "get_path", lambda name: str(root))
    monkeypatch.setattr(text, "_topics", lambda: iter(()))
    return tmp_path / "sample.jsonl"


def test_modules_are_written_in_order_and_docstrings_once(small_library):
    write_sample(small_library)
    documents = {document["source"]: document["text"] for document in read(small_library)}
    assert list(documents) == [
        "docstrings/b.py",
        "sources/a.py",
        "sources/b.py",
        "sources/future.py",
    ]
    assert documents["docstrings/b.py"] == "b.py\nDocs é.\n\nA\nOf A.\n\nMore.\n\nf\none"
    assert documents["sources/b.py"] == (
        '...\n\n\nclass A:\n    ...  # x\n\n    def f(self): ...; return "é"\n'
    )
    ast.parse(documents["sources/b.py"])


def test_sources_alone_keep_their_docstrings(small_library):
    write_sample(small_library, include=("sources",))
    assert MODULE in [document["text"] for document in read(small_library)]


def test_this_python_has_text_and_the_limit_holds(tmp_path):
    written = write_sample(tmp_path / "a.jsonl", limit=200_000)
    write_sample(tmp_path / "b.jsonl", limit=200_000)
    documents = read(tmp_path / "a.jsonl")
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    assert written.documents == len(documents) > 10
    assert 100_000 < written.text_bytes <= 200_000
    assert written.text_bytes == sum(len(document["text"].encode()) for document in documents)


def test_no_text_is_an_error_and_leaves_no_file(tmp_path):
    with pytest.raises(DataError, match="no text of topics below 10 bytes"):
        write_sample(tmp_path / "a.jsonl", include=("topics",), limit=10)
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(DataError, match=r"file"):
        write_sample(tmp_path / "file" / "sample.jsonl", include=("topics",), limit=10_000)


def test_a_missing_directory_is_made(tmp_path):
    write_sample(tmp_path / "new" / "sample.jsonl", include=("topics",), limit=10_000)
    assert (tmp_path / "new" / "sample.jsonl").stat().st_size > 0
