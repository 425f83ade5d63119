import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphtrain.cache.key import ABSENT, CacheKey, Difference

# Few values and names, so that two keys are often nearly equal, and the values Python confuses.
LEAVES = st.sampled_from([None, True, False, 0, 1, 0.0, -0.0, 1.0, 1e-300, "", "1", "null", "é"])
NAMES = st.sampled_from(["data", "fsdp", "cls", "0", "é"])
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)
PARTS = st.dictionaries(NAMES, VALUES, max_size=3)
PAIRS = st.tuples(PARTS, PARTS) | PARTS.map(lambda parts: (parts, parts))


@dataclass(frozen=True)
class Batch:
    sequences: int
    shape: tuple[int, ...] = (2, 3)


def key(**changes) -> CacheKey:
    parts = {
        "graph": "train",
        "program": {"mesh": {"data": 4}},
        "rules": {},
        "sources": {"models/decoder.py": "aa"},
        "target": {"machine": "cpu", "topology": "8"},
        "toolchain": {"versions": {"jax": "0.10.2"}},
    }
    return CacheKey.of(**(parts | changes))


@given(PAIRS)
def test_digests_and_keys_are_equal_exactly_if_the_parts_are_the_same_json(pair):
    mine, theirs = (CacheKey.of(**parts) for parts in pair)
    same = json.dumps(pair[0]) == json.dumps(pair[1])
    assert (mine == theirs) is same
    assert (mine.digest == theirs.digest) is same


@given(PAIRS)
def test_there_are_differences_exactly_if_keys_differ(pair):
    mine, theirs = (CacheKey.of(**parts) for parts in pair)
    assert bool(mine.differences(theirs)) is (mine != theirs)
    assert len(mine.differences(theirs)) == len(theirs.differences(mine))


@given(PARTS)
def test_a_key_survives_json(parts):
    before = CacheKey.of(**parts)
    after = CacheKey.from_json(json.loads(json.dumps(before.to_json())))
    assert after == before
    assert after.digest == before.digest


def test_a_digest_is_the_same_in_every_process():
    # printf '%s' '[["a","1"],["b","{\"c\":[1.5,null]}"]]' | sha256sum | cut -c1-40
    key = CacheKey.of(a=1, b={"c": [1.5, None]})
    assert key.digest == "0b18cbebf62343622acc88e3276380b512ba4a1f"


def test_a_dataclass_is_its_fields_and_a_tuple_is_a_list():
    mine = CacheKey.of(batch=Batch(8))
    assert mine == CacheKey.of(batch={"sequences": 8, "shape": [2, 3]})


def test_the_order_of_a_mapping_is_meaning():
    mine, theirs = (
        CacheKey.of(mesh={"data": 2, "fsdp": 2}),
        CacheKey.of(mesh={"fsdp": 2, "data": 2}),
    )
    assert mine.digest != theirs.digest
    assert mine.differences(theirs) == [Difference(("mesh",), ["data", "fsdp"], ["fsdp", "data"])]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), "a.b: nan is not JSON"),
        (float("inf"), "a.b: inf is not JSON"),
        (Path("/somewhere"), "a.b: .*Path.* is not JSON"),
        ({1, 2}, "a.b: {1, 2} is not JSON"),
        (b"x", "a.b: b'x' is not JSON"),
        ([1, object()], r"a.b\[1\]: <object .* is not JSON"),
        ({1: "x"}, "a.b: the name 1 is not a string"),
    ],
)
def test_what_is_not_json_is_refused_with_its_place(value, message):
    with pytest.raises(TypeError, match=message):
        CacheKey.of(a={"b": value})


def test_differences_are_leaves_with_their_paths():
    other = key(
        toolchain={"versions": {"jax": "0.10.1"}},
        program={"mesh": {"data": 8}},
        sources={"models/mixture.py": "bb"},
    )
    assert key().differences(other) == [
        Difference(("program", "mesh", "data"), 4, 8),
        Difference(("sources", "models/decoder.py"), "aa", ABSENT),
        Difference(("sources", "models/mixture.py"), ABSENT, "bb"),
        Difference(("toolchain", "versions", "jax"), "0.10.2", "0.10.1"),
    ]


def test_lists_are_compared_item_by_item_only_if_they_hold_mappings():
    mine = CacheKey.of(layers=[{"width": 1}, {"width": 2}], sizes=[1, 2])
    theirs = CacheKey.of(layers=[{"width": 1}, {"width": 3}], sizes=[1, 3])
    assert mine.differences(theirs) == [
        Difference(("layers", "1", "width"), 2, 3),
        Difference(("sizes",), [1, 2], [1, 3]),
    ]


def test_part_gives_back_a_value_and_none_for_no_such_part():
    assert key().part("program") == {"mesh": {"data": 4}}
    assert key().part("weather") is None
