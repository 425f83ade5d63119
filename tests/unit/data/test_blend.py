import itertools
import json
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphtrain.data.batches.blend import Blend, blend_counts
from graphtrain.data.batches.loader import Loader
from graphtrain.errors import DataError


@dataclass(frozen=True)
class Part:
    dataset: str
    weight: float | None = None
    epochs: float | None = None


SHAPE = {"global_batch_size": 8, "seq_len": 4, "seed": 3}
SIZES = 40, 12, 28  # sequences in an epoch of three datasets


@pytest.fixture(scope="module")
def prefixes(make_dataset):
    """Datasets whose tokens say which it is: 1000 and up, 2000 and up, 3000 and up."""
    return [
        make_dataset([[1000 * (number + 1) + i for i in range(4 * size + 1)]], 4000)
        for number, size in enumerate(SIZES)
    ]


def blend(prefixes, **shares) -> list[Part]:
    ((kind, values),) = shares.items()
    return [Part(p, **{kind: value}) for p, value in zip(prefixes, values, strict=True)]


def take(loader: Loader, count: int) -> np.ndarray:
    batches = list(itertools.islice(loader, count))
    loader.close()
    return np.concatenate([batch["tokens"] for batch in batches])


@given(counts=st.lists(st.integers(1, 50), min_size=1, max_size=6), position=st.integers(0, 10**12))
@settings(max_examples=50, deadline=None)
def test_every_period_takes_the_next_sequences_of_each_in_order(counts, position):
    made, total = Blend(np.array(counts)), sum(counts)
    period = position // total
    places = [made.locate(period * total + slot) for slot in range(total)]
    for owner, count in enumerate(counts):
        numbers = [number for which, number in places if which == owner]
        assert numbers == list(range(period * count, (period + 1) * count))
        taken = np.cumsum([which == owner for which, _ in places])
        even = np.arange(1, total + 1) * count / total
        assert np.abs(taken - even).max() <= 1 + len(counts) / 2


@given(weights=st.lists(st.floats(0.001, 1.0), min_size=2, max_size=6))
@settings(max_examples=20, deadline=None)
def test_shares_are_those_of_the_weights(weights):
    counts = blend_counts(blend([""] * len(weights), weight=weights), [9] * len(weights))
    np.testing.assert_allclose(counts / counts.sum(), np.array(weights) / sum(weights), atol=2e-6)


def test_weights_decide_how_many_sequences_come_from_each(prefixes):
    tokens = take(Loader(blend(prefixes, weight=(5, 2, 1)), **SHAPE), 40)
    owners = tokens[:, 0] // 1000
    assert np.bincount(owners)[1:].tolist() == [200, 80, 40]
    assert (tokens // 1000 == owners[:, None]).all()


def test_epochs_decide_how_often_each_is_read(prefixes):
    tokens = take(Loader(blend(prefixes, epochs=(1, 3, 0.5)), **SHAPE), 45)
    period = tokens[:90].ravel()
    numbers, counts = np.unique(period, return_counts=True)
    for first, times, distinct in ((1000, 1, 160), (2000, 3, 48), (3000, 1, 56)):
        mine = (numbers >= first) & (numbers < first + 1000)
        assert set(counts[mine].tolist()) == {times}
        assert mine.sum() == distinct
    rest = np.unique(tokens[90:180].ravel())
    assert (rest >= 3000).sum() == 56
    assert not set(rest[rest >= 3000]) & set(numbers)  # the other half of the third


@pytest.mark.parametrize("ranks", [2, 8])
def test_the_stream_does_not_depend_on_the_number_of_ranks(prefixes, ranks):
    parts = blend(prefixes, weight=(5, 2, 1))
    want = take(Loader(parts, **SHAPE), 6).reshape(6, 8, 4)
    got = [
        take(Loader(parts, **SHAPE, rows=rows), 6).reshape(6, -1, 4)
        for rows in np.split(np.arange(8), ranks)
    ]
    np.testing.assert_array_equal(np.concatenate(got, axis=1), want)


def test_a_restored_loader_continues_exactly(prefixes):
    parts = blend(prefixes, weight=(5, 2, 1))
    first = Loader(parts, **SHAPE)
    list(itertools.islice(first, 13))
    state = json.loads(json.dumps(first.state()))
    want = take(first, 5)
    restored = Loader(parts, **SHAPE)
    restored.restore(state)
    np.testing.assert_array_equal(take(restored, 5), want)
    other = Loader(blend(prefixes, weight=(5, 2, 2)), **SHAPE)
    with pytest.raises(DataError, match=r"cannot resume at step 13: blend was .*restore the set"):
        other.restore(state)
    alone = Loader(prefixes[0], **SHAPE)
    with pytest.raises(DataError, match="cannot resume at step 13"):
        alone.restore(state)
    other.close()
    alone.close()


def test_the_documents_of_a_step_are_named_by_dataset(prefixes):
    loader = Loader(blend(prefixes, weight=(1, 1, 1)), **SHAPE)
    loader.close()
    named = "; ".join(f"documents 0 of {prefix}" for prefix in prefixes)
    assert sorted(loader.describe(0).split("; ")) == sorted(named.split("; "))


def test_a_share_too_small_to_be_kept_is_refused(prefixes):
    with pytest.raises(DataError, match=r"its share of the blend, 1e-08, is too small"):
        Loader(blend(prefixes, weight=(1, 1e-8, 1e-3)), **SHAPE)
