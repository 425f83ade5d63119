import json

import pytest

from graphtrain.cache import Cache, CacheWarning
from graphtrain.cache.key import CacheKey
from lowering.artifact import Artifact

KEY = CacheKey.of(text="module {}")
PARTS = {
    "graph": "train",
    "program": {"model": {"layers": 2}, "batch": {"length": 64}},
    "mesh": {"data": 4, "fsdp": 2},
    "rules": {"parameters": {"embed": ["fsdp"]}},
    "sources": {"models/decoder.py": "a" * 64, "steps.py": "b" * 64},
    "target": {"machine": "cpu", "topology": "2", "processor": {"features": "0123456789abcdef"}},
    "toolchain": {"versions": {"jax": "0.10.1"}, "environment": {}},
}


def request(**changes) -> CacheKey:
    return CacheKey.of(**(PARTS | changes))


@pytest.fixture
def cache(tmp_path):
    cache = Cache(tmp_path / "store")
    cache.put(KEY, Artifact(b"x", {}))
    cache.record_request(request(), KEY)
    return cache


def test_a_hit_names_its_program(cache):
    explanation = cache.explain(request())
    assert explanation.hit
    assert explanation.program == KEY.digest
    assert str(explanation) == f"the train graph is stored: {KEY.digest}"


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        (
            {"toolchain": {"versions": {"jax": "0.10.2"}, "environment": {"XLA_FLAGS": "--a"}}},
            ["toolchain: XLA_FLAGS absent → --a", "toolchain: jax 0.10.1 → 0.10.2"],
        ),
        (
            {"program": {"model": {"layers": 2}, "batch": {"length": 128}}},
            ["batch length: 64 → 128"],
        ),
        (
            {"mesh": {"data": 8, "fsdp": 2}},
            ["mesh data: 4 → 8"],
        ),
        (
            {"mesh": {"fsdp": 2, "data": 4}},
            ['mesh: ["data", "fsdp"] → ["fsdp", "data"]'],
        ),
        (
            {"rules": {"parameters": {"embed": ["fsdp", "tensor"]}}},
            ['rules parameters embed: ["fsdp"] → ["fsdp", "tensor"]'],
        ),
        (
            {"sources": {"models/decoder.py": "c" * 64, "new.py": "d" * 64}},
            [
                "source of models/decoder.py changed",
                "source of new.py added",
                "source of steps.py removed",
            ],
        ),
        (
            {"target": {**PARTS["target"], "topology": "8"}},
            ["target: cpu:2 → cpu:8"],
        ),
        (
            {"target": {**PARTS["target"], "processor": {"features": "fedcba9876543210"}}},
            ["target processor features changed"],
        ),
        ({"target": "tpu"}, ["target: cpu:2 → tpu"]),
    ],
)
def test_a_miss_says_what_changed_in_words_to_act_on(cache, changes, lines):
    explanation = cache.explain(request(**changes))
    assert not explanation.hit
    assert sorted(explanation.lines) == lines
    assert "differences from the nearest of 1 stored ones" in explanation.reason


def test_the_nearest_stored_request_is_explained_and_the_newest_of_equals(cache, monkeypatch):
    monkeypatch.setattr(
        "graphtrain.cache.stored_requests.timestamp", lambda: "2999-01-01T00:00:00Z"
    )
    cache.record_request(request(program={"layers": 4}, mesh={"data": 1, "fsdp": 1}), KEY)
    cache.record_request(request(program={**PARTS["program"], "model": {"layers": 8}}), KEY)
    asked = request(program={**PARTS["program"], "model": {"layers": 6}})
    explanation = cache.explain(asked)
    assert explanation.lines == ("model layers: 8 → 6",)
    assert [len(neighbour.differences) for neighbour in explanation.nearest] == [1, 1, 5]


def test_another_graph_is_not_compared_with(cache):
    explanation = cache.explain(request(graph="decode"))
    assert explanation.nearest == ()
    assert str(explanation) == f"the cache at {cache.root} contains no decode graph"


def test_a_graph_is_found_by_the_name_it_was_linked_with(cache):
    cache.record_request(request(graph="step"), KEY, graph="prefill")
    explanation = cache.explain(request(graph="step", target="cpu:9"), graph="prefill")
    assert explanation.lines == ("target: cpu:2 → cpu:9",)


def test_a_program_that_was_removed_is_said_to_be(cache):
    cache.record_request(request(), CacheKey.of(text="removed"))
    explanation = cache.explain(request())
    assert not explanation.hit
    assert "was compiled before, but its program" in str(explanation)
    assert "is no longer stored" in str(explanation)


def test_a_program_that_cannot_be_used_is_said_to_be(cache):
    (cache.root / "v1" / "programs" / KEY.digest / "payload").write_bytes(b"")
    assert str(cache.explain(request())).endswith(
        "cannot be used: payload has 0 bytes instead of 1"
    )


def test_an_explanation_is_json(cache):
    asked = request(toolchain={"versions": {"jax": "0.10.2"}})
    facts = json.loads(json.dumps(cache.explain(asked).to_json()))
    assert facts["hit"] is False
    assert facts["nearest"][0]["differences"] == [
        {"path": ["toolchain", "versions", "jax"], "mine": "0.10.2", "theirs": "0.10.1"},
        {"path": ["toolchain", "environment"], "theirs": {}},
    ]


def test_a_damaged_request_is_explained_as_it_is_looked_up(cache):
    (path,) = (cache.root / "v1" / "requests").glob("*.json")
    path.write_text(path.read_text().replace('"layers":2', '"layers":3'))
    with pytest.warns(CacheWarning, match="do not match its digest"):
        assert cache.get_by_request(request()) is None
    explanation = cache.explain(request())
    assert not explanation.hit
    assert "stored request cannot be used: the request's contents" in explanation.reason


def test_a_graph_on_fewer_hosts_is_compared_with_all_stored_ones_of_its_name(cache):
    other = request(mesh={"data": 2, "fsdp": 2})
    found = cache.explain_all({"train": request(), "on 2 hosts train": other})
    assert found["train"].hit and not found["on 2 hosts train"].hit
    assert "contains no on 2 hosts train graph with" in found["on 2 hosts train"].reason
    assert found["on 2 hosts train"].lines == ("mesh data: 4 → 2",)
