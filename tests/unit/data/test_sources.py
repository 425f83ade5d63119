"""Datasets of the user's code are batched as those of files are."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from graphtrain.config import load_config
from graphtrain.data.batches.evaluation_batches import evaluation_batches
from graphtrain.data.batches.loader import Loader
from graphtrain.data.batches.sources import SourceDataset, check_source
from graphtrain.errors import ConfigError, DataError
from graphtrain.run.data_sources import open_sources
from graphtrain.run.resume import identity_of

SHAPE = {"global_batch_size": 4, "seq_len": 6}
DOCUMENTS = [list(range(1, 2 + n * 5 % 11)) for n in range(23)]


class Source:
    digest = "1"

    def __init__(self, documents=DOCUMENTS):
        self.documents = documents

    def __len__(self):
        return len(self.documents)

    def __getitem__(self, index):
        return self.documents[index]


class Sized(Source):
    @property
    def sizes(self):
        return [len(document) for document in self.documents]


class Masked(Source):
    """Every document is trained on from its second token, as all of one text without a mask."""

    def __getitem__(self, index):
        tokens = self.documents[index]
        return tokens, np.arange(len(tokens)) > 0


def batches(data, sources, count=9, **settings):
    loader = Loader(data, **SHAPE, seed=3, sources=sources, **settings)
    taken = [next(loader) for _ in range(count)]
    state = loader.state()
    loader.close()
    return taken, state


def assert_equal(left, right):
    for one, other in zip(left, right, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])


@pytest.mark.parametrize("kind", [Source, Sized])
@pytest.mark.parametrize("packing", ["concat", "best_fit", "pad"])
def test_its_batches_are_those_of_a_dataset_of_files(make_dataset, kind, packing):
    prefix = make_dataset(DOCUMENTS, 16)
    settings = {"packing": packing, "overlong": "truncate", "isolate_documents": True}
    with pytest.warns(UserWarning, match="longer than") if packing != "concat" else _quiet():
        theirs, _ = batches(prefix, {}, **settings)
        mine, _ = batches("a.py:A", {"a.py:A": kind()}, **settings)
    assert_equal(mine, theirs)


def _quiet():
    from contextlib import nullcontext

    return nullcontext()


def test_a_validation_pass_and_a_mask_and_a_blend(make_dataset):
    with pytest.warns(UserWarning, match="longer than"):
        packed = {"packing": "best_fit", "overlong": "truncate"}
        plain = evaluation_batches("a", batch_size=4, seq_len=6, sources={"a": Source()}, **packed)
        masked = evaluation_batches("a", batch_size=4, seq_len=6, sources={"a": Masked()}, **packed)
        assert_equal(list(plain), list(masked))

    @np.vectorize
    def owner(token):
        return token > 50

    part = type("Part", (), {"dataset": "a.py:A", "weight": 1.0, "epochs": None})
    other = type("Part", (), {"weight": 1.0, "epochs": None})
    other.dataset = make_dataset([[60, 61, 62, 63]] * 9, 99)
    (first, *_), _ = batches([part, other], {"a.py:A": Source()})
    assert owner(first["tokens"][:, 0]).sum() == 2


def test_a_loader_resumes_and_refuses_another_size():
    taken, _ = batches("a", {"a": Source()}, 9)
    _, state = batches("a", {"a": Source()}, 4)
    loader = Loader("a", **SHAPE, seed=3, sources={"a": Source()})
    loader.restore(state)
    assert_equal([next(loader) for _ in range(5)], taken[4:])
    loader.close()
    shorter = Loader("a", **SHAPE, seed=3, sources={"a": Source(DOCUMENTS[:-1])})
    with pytest.raises(DataError, match="cannot resume at step 4: documents was 23 and is now 22"):
        shorter.restore(state)
    shorter.close()


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([], "a: has no documents"),
        ([[], []], "a: its documents have no tokens"),
        ([[1.5, 2.0]], "a: document 0 has float64, not integers"),
        ([[[1], [2]]], "a: document 0 has 2 dimensions, not 1"),
        ([[1, 2], ([1, 2], [1, 1])], "a: document 1: every document has a loss mask"),
        ([([1, 2], [1])], "a: document 0: every document has a loss mask with a value for each"),
    ],
)
def test_what_is_no_document_is_named(documents, message):
    with pytest.raises(DataError) as raised:
        SourceDataset("a", Source(documents))
    assert str(raised.value).startswith(message)


def test_a_document_that_changes_and_code_that_fails_are_named():
    source = Sized([[1, 2, 3], [4]])
    dataset = SourceDataset("a.py:A", source)
    source.documents = [[1, 2], [4]]
    with pytest.raises(DataError, match=r"a.py:A: document 0 has 2 tokens, and had 3"):
        dataset.document(0)
    source.documents = [[1, 2, 3]]
    with pytest.raises(DataError, match=r"a.py:A: document 1: IndexError: list index out of ra"):
        dataset.document(1)
    with pytest.raises(DataError, match=r"a: a dataset needs a digest, a string that"):
        check_source("a", [1])
    with pytest.raises(DataError, match=r"a: a dataset needs __len__ and __getitem__"):
        check_source("a", 1)


CODE = """
class A:
    digest = "first"
    def __init__(self, words=1):
        self.words = words
    def __len__(self):
        return 3
    def __getitem__(self, index):
        return [index, self.words]
"""
CONFIG = """
[program]
target = "cpu:1"
[program.model]
layers = 1
embed = 8
heads = 2
mlp = 8
vocab = 8
[program.batch]
global_batch_size = 2
seq_len = 4
[run]
directory = "run"
steps = 1
[run.data]
train = "a.py:A"
arguments = {words = 5}
"""


def test_what_a_source_is_stands_in_checkpoints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.py").write_text(CODE)
    config = load_config(CONFIG)
    assert list(open_sources(config.run.data)["a.py:A"][2]) == [2, 5]
    (saved,) = identity_of(config)["run.data.train"]
    assert saved["digest"] == "first"
    digest = hashlib.sha256(CODE.encode()).hexdigest()[:16]
    assert saved["code"] == {"name": "A", "sources": {"a.py": digest}}
    assert identity_of(config)["run.data.arguments"] == {"words": 5}
    Path("a.py").write_text(CODE.replace("first", "second"))
    (edited,) = identity_of(config)["run.data.train"]
    assert edited["digest"] == "second" and edited["code"] != saved["code"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"run.data.train": "data"}, 'arguments are those of a dataset that is "file.py:name"'),
        ({"run.data.train": "b.py:A"}, 'run.data.train = "b.py:A": b.py not found'),
        ({"run.data.train": "a.py:B"}, 'run.data.train = "a.py:B": a.py has no B'),
        ({"run.data.arguments": {"size": 1}}, "raised TypeError: A.__init__\\(\\) got an unexp"),
    ],
)
def test_what_is_wrong_with_a_reference_is_said(tmp_path, monkeypatch, change, message):
    monkeypatch.chdir(tmp_path)
    Path("a.py").write_text(CODE)
    from graphtrain.config.render import toml

    with pytest.raises(ConfigError, match=message):
        open_sources(
            load_config(
                CONFIG, [f"{name}={toml(value)}" for name, value in change.items()]
            ).run.data
        )
