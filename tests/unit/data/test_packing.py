import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphtrain.data.batches.concat_packing import ConcatPacking
from graphtrain.data.indexed.dataset import IndexedDataset
from graphtrain.errors import DataError

sizes_strategy = st.lists(st.integers(0, 9), min_size=1, max_size=15).filter(lambda s: sum(s) > 1)


def numbered(sizes: list[int]) -> list[list[int]]:
    """Documents in which every token is another number."""
    ends = np.cumsum(sizes)
    return [list(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]


@given(sizes=sizes_strategy, length=st.integers(1, 12), epoch=st.integers(0, 3))
@settings(max_examples=50, deadline=None)
def test_every_token_of_every_epoch_appears_and_is_a_target_once(
    make_dataset, sizes, length, epoch
):
    packing = ConcatPacking(IndexedDataset(make_dataset(numbered(sizes), 1000)), length, seed=5)
    batch = packing.batch([epoch * len(packing) + row for row in range(len(packing))])
    scored = batch["weights"] == 1
    first = batch["tokens"][0, 0]
    assert sorted([first, *batch["targets"][scored]]) == list(range(sum(sizes)))
    assert (batch["tokens"][:, 1:] == batch["targets"][:, :-1]).all()
    assert not batch["targets"][~scored].any()


@given(sizes=sizes_strategy, length=st.integers(1, 12), data=st.data())
@settings(max_examples=50, deadline=None)
def test_documents_are_kept_whole_and_named(make_dataset, sizes, length, data):
    documents = numbered(sizes)
    packing = ConcatPacking(IndexedDataset(make_dataset(documents, 1000)), length, seed=5)
    index = data.draw(st.integers(0, 3 * len(packing) - 1))
    touched = packing.documents(index)
    whole = np.concatenate([documents[i] for i in touched])
    sequence = packing.sequence(index)
    start = int(np.argmax(whole == sequence[0]))
    assert (whole[start : start + len(sequence)] == sequence).all()
    assert start < len(documents[touched[0]])
    assert len(whole) - start - len(sequence) < len(documents[touched[-1]])


@given(sizes=sizes_strategy, length=st.integers(1, 12))
@settings(max_examples=30, deadline=None)
def test_without_a_seed_the_order_is_that_of_the_dataset(make_dataset, sizes, length):
    packing = ConcatPacking(IndexedDataset(make_dataset(numbered(sizes), 1000)), length)
    batch = packing.batch(range(len(packing)))
    scored = batch["weights"] == 1
    assert batch["targets"][scored].tolist() == list(range(1, sum(sizes)))
    assert (batch["tokens"][scored] == batch["targets"][scored] - 1).all()


def test_each_epoch_has_another_order(make_dataset):
    packing = ConcatPacking(
        IndexedDataset(make_dataset([[i] * 4 for i in range(32)], 32)), 127, seed=0
    )
    assert len(packing) == 1
    assert packing.sequence(0).tolist() != packing.sequence(1).tolist()
    assert sorted(packing.sequence(0)) == sorted(packing.sequence(1))


def test_one_token_cannot_be_packed(make_dataset):
    with pytest.raises(DataError, match="train: has one token"):
        ConcatPacking(IndexedDataset(make_dataset([[1]], 10)), 4)


def test_a_token_outside_the_vocabulary_names_dataset_document_and_token(make_dataset):
    packing = ConcatPacking(
        IndexedDataset(make_dataset([[1, 2], [], [3, 70000, 4]], 70001)), 8, vocab=256
    )
    with pytest.raises(
        DataError, match=r"train: document 2 contains token 70000.*vocabulary of 256"
    ):
        packing.sequence(0)


def test_a_negative_token_is_refused_without_a_vocabulary(make_dataset):
    prefix = make_dataset([[1, 2], [3, 4]], 70001)
    with open(f"{prefix}.bin", "r+b") as file:
        file.seek(8)
        file.write(b"\xff\xff\xff\xff")
    with pytest.raises(DataError, match="document 1 contains token -1, which is outside any"):
        ConcatPacking(IndexedDataset(prefix), 8).batch([0])
