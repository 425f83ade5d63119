import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphtrain.data.batches.evaluation_batches import evaluation_batches
from graphtrain.data.indexed.dataset import IndexedDataset
from graphtrain.errors import DataError
from graphtrain.run import bigram_baseline
from graphtrain.run.bigram_baseline import Bigram

documents_strategy = st.lists(
    st.lists(st.integers(0, 6), min_size=1, max_size=30), min_size=2, max_size=8
)


def joined(documents: list[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(documents))


def naive_loss(train: list[int], validation: list[int], vocab: int) -> float:
    counts = np.ones((vocab, vocab))
    for first, second in itertools.pairwise(train):
        counts[first, second] += 1
    probabilities = counts / counts.sum(axis=1, keepdims=True)
    pairs = itertools.pairwise(validation)
    return float(np.mean([-np.log(probabilities[pair]) for pair in pairs]))


@given(train=documents_strategy, validation=documents_strategy, chunk=st.sampled_from([3, 1 << 22]))
@settings(max_examples=40, deadline=None)
def test_the_loss_is_that_of_a_dense_table(make_dataset, train, validation, chunk):
    prefix = make_dataset(validation, 7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bigram_baseline, "_CHUNK", chunk)
        model = Bigram.count(IndexedDataset(make_dataset(train, 7)), 7)
    loss = model.loss(evaluation_batches(prefix, batch_size=2, seq_len=5))
    assert loss == pytest.approx(naive_loss(joined(train), joined(validation), 7), rel=1e-12)


def test_a_vocabulary_of_many_thousands_needs_no_dense_table(make_dataset):
    prefix = make_dataset([[0, 199_999, 0, 199_999]], 200_000)
    model = Bigram.count(IndexedDataset(prefix), 200_000)
    seen = model.probabilities(np.array([0]), np.array([199_999]))
    assert seen == pytest.approx([3 / 200_002])


def test_a_token_outside_the_vocabulary_is_refused(make_dataset):
    dataset = IndexedDataset(make_dataset([[1, 9]], 10))
    with pytest.raises(DataError, match="train: contains token 9, but vocab = 9"):
        Bigram.count(dataset, 9)


def test_a_blend_counts_each_dataset_as_often_as_it_is_read(make_dataset):
    documents = [[1, 2, 1, 2]], [[1, 3, 2, 3, 1, 2, 3]]
    models = [Bigram.count(IndexedDataset(make_dataset(each, 4)), 4) for each in documents]
    # 9 pairs in all: 3 of them from the first, 6 from the second, as they are.
    same = Bigram.weighted_sum(models, np.array([1, 2]))
    counted = zip(same.pairs, same.pair_counts, strict=True)
    assert {divmod(pair, 4): count for pair, count in counted} == {
        (1, 2): 2 + 1,
        (1, 3): 1,
        (2, 1): 1,
        (2, 3): 2,
        (3, 1): 1,
        (3, 2): 1,
    }
    assert same.first_counts.tolist() == [0, 4, 3, 2]
    even = Bigram.weighted_sum(models, np.array([5, 5]))
    expected = 2 * 1.5 + 1 * 0.75
    assert even.probabilities(np.array([1]), np.array([2]))[0] == pytest.approx(
        (expected + 1) / (2 * 1.5 + 2 * 0.75 + 4)
    )
