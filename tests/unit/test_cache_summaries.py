"""Requests as they are listed, compared and counted without interpreting them whole."""

import itertools
import json
import random

import pytest

from graphtrain.cache import Cache
from graphtrain.cache.key import CacheKey
from graphtrain.cache.programs import UnusableEntry
from graphtrain.cache.stored_requests import decode, encode
from graphtrain.cache.summaries import summarize
from lowering.artifact import Artifact

KEY = CacheKey.of(text="module {}")
REQUEST = CacheKey.of(
    graph="train",
    program={"layers": 2, "names": ["a,\n", 'b":', "}}", "é"], "rate": 1e-3, "none": None},
    target={"machine": "h100", "topology": [4, 2]},
)
TEXT = encode(REQUEST, KEY.digest, "train")


@pytest.fixture
def cache(tmp_path):
    cache = Cache(tmp_path)
    cache.put(KEY, Artifact(b"x", {}))
    return cache


def test_a_file_has_a_line_for_each_part_and_is_json():
    assert len(TEXT.splitlines()) == 2 + len(REQUEST.parts)
    assert CacheKey.from_json(json.loads(TEXT)["parts"]) == REQUEST


def test_a_summary_says_what_the_request_says():
    summary, request = summarize(TEXT, REQUEST.digest), decode(TEXT, REQUEST.digest)
    assert summary[:4] == (request.digest, request.graph, request.program, request.created)
    assert summary.target == request.target == "h100:4x2"
    assert {name: text.decode() for name, text in summary.parts.items()} == dict(REQUEST.parts)


def test_a_key_without_parts_is_listed():
    assert summarize(encode(CacheKey.of(), KEY.digest, ""), "").parts == {}


def test_a_file_of_one_line_is_listed_as_before(cache):
    cache.record_request(REQUEST, KEY)
    (before,) = cache.list()
    path = cache.root / "v1" / "requests" / f"{REQUEST.digest}.json"
    path.write_text(json.dumps(json.loads(path.read_text())))
    assert cache.list() == (before,)
    assert cache.explain(REQUEST).hit
    (neighbour,) = cache.explain(CacheKey.of(graph="train", program={}), graph="train").nearest
    assert neighbour.request == REQUEST.digest


def test_a_file_that_is_cut_anywhere_is_not_listed():
    for length in range(len(TEXT)):
        with pytest.raises(UnusableEntry):
            summarize(TEXT[:length], REQUEST.digest)


def test_a_damaged_part_is_listed_and_compared_until_it_is_read(cache):
    """verify tells; a listing of thousands goes on."""
    cache.record_request(REQUEST, KEY)
    path = cache.root / "v1" / "requests" / f"{REQUEST.digest}.json"
    path.write_bytes(path.read_bytes().replace(b'"layers":2', b'"layers":\xff'))
    assert len(cache.list()) == 1
    assert cache.explain(CacheKey.of(graph="train")).nearest == ()
    (problem,) = cache.verify().problems
    assert problem.kind == "damaged"


def test_the_nearest_are_those_with_the_fewest_differences(cache):
    """Counted part by part from texts, as many as the keys themselves tell."""
    dice = random.Random(0)
    values = (1, 1.0, True, None, {"a": 1, "b": 2}, {"b": 2, "a": 1}, {"a": 1}, [{"a": 1}], "1")
    names = list(itertools.permutations(("program", "mesh", "rules"), 3))
    stored = [
        CacheKey.of(graph="train", **{name: dice.choice(values) for name in dice.choice(names)})
        for _ in range(60)
    ]
    for request in stored:
        cache.record_request(request, KEY)
    for asked in stored[:10]:
        asked = CacheKey.of(**asked.to_json(), batch={"length": 3})
        nearest = cache.explain(asked).nearest
        distances = sorted(len(asked.differences(one)) for one in {*stored})
        assert [len(one.differences) for one in nearest] == distances[:3]


def test_several_graphs_are_explained_at_once_as_one_by_one(cache):
    for graph, layers in itertools.product(("init", "train"), (1, 2, 3)):
        cache.record_request(CacheKey.of(graph=graph, program={"layers": layers}), KEY)
    asked = {
        "init": CacheKey.of(graph="init", program={"layers": 1}),
        "train": CacheKey.of(graph="train", program={"layers": 4}),
        "decode": CacheKey.of(graph="decode"),
    }
    together = cache.explain_all(asked)
    assert together == {graph: cache.explain(request) for graph, request in asked.items()}
    assert [explained.hit for explained in together.values()] == [True, False, False]
