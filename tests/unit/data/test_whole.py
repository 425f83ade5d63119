"""Rows of whole documents, and batches of them."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphtrain.config.schema import BlendPart
from graphtrain.data.batches.best_fit import best_fit
from graphtrain.data.batches.evaluation_batches import evaluation_batches
from graphtrain.data.batches.loader import Loader
from graphtrain.data.indexed.dataset import IndexedDataset
from graphtrain.data.indexed.loss_spans import LossSpans
from graphtrain.data.prepare.instructions import instruct
from graphtrain.data.prepare.text import prepare
from graphtrain.errors import DataError


@settings(max_examples=200)
@given(sizes=st.lists(st.integers(1, 20), max_size=60))
def test_best_fit_fills_rows_and_overfills_none(sizes):
    rows = best_fit(np.array(sizes, np.int64), 20)
    filled = np.bincount(rows, sizes) if sizes else np.empty(0)
    assert (filled > 0).all() and (filled <= 20).all()
    # Johnson et al. 1974: no more than 11/9 of the best + 4, which is at least the sum of sizes.
    assert len(filled) <= 11 / 9 * max(-(-sum(sizes) // 20), sum(size > 10 for size in sizes)) + 4


def one_by_one(sizes, length):
    """Best-fit decreasing as the algorithm is written, which searches a row for each document."""
    free, row_of, order = [], np.zeros(len(sizes), np.int64), []
    for document in np.argsort(-sizes, kind="stable"):
        size = sizes[document]
        rows = [row for row in order if free[row] >= size]
        # Of several rows, the one that a document was added to last.
        row = min(reversed(rows), key=lambda row: free[row]) if rows else len(free)
        if row == len(free):
            free.append(length)
        else:
            order.remove(row)
        free[row] -= size
        order.append(row)
        row_of[document] = row
    return row_of


@settings(max_examples=300, deadline=None)
@given(sizes=st.lists(st.integers(1, 24), max_size=120), length=st.integers(24, 60))
def test_best_fit_of_equal_sizes_at_once_is_that_of_one_document_after_another(sizes, length):
    sizes = np.array(sizes, np.int64)
    assert best_fit(sizes, length).tolist() == one_by_one(sizes, length).tolist()


def test_best_fit_leaves_the_least_room():
    assert best_fit(np.array([6, 4, 3, 7, 5, 5]), 10).tolist() == [1, 1, 0, 0, 2, 2]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """40 conversations, 20 pairs and some text, all bytes."""
    path = tmp_path_factory.mktemp("data")
    chats = [
        {"instruction": f"Question {number}", "output": "answer " * (1 + number * 7 % 11)}
        for number in range(40)
    ]
    pairs = [
        {"prompt": f"Question {number}", "chosen": "yes " * (number + 1), "rejected": "no"}
        for number in range(20)
    ]
    texts = [{"text": "some text " * 20}] * 10
    for name, records in (("chats", chats), ("pairs", pairs), ("texts", texts)):
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (path / f"{name}.jsonl").write_text(lines)
    for name in ("chats", "pairs"):
        settings = {"template": "chatml", "validation": 0}
        instruct([path / f"{name}.jsonl"], path / name, "bytes", **settings)
    prepare([path / "texts.jsonl"], path / "texts", "bytes", validation=0)
    return path


def rows_of(data, name, **options):
    settings = {"seq_len": 256, "global_batch_size": 4, "seed": 3} | options
    return Loader(data / name / "train", **settings)


def conversations_in(batch, row):
    """Tokens and weights of each document of a row, as it says which they are."""
    numbers = batch["documents"][row]
    for number in range(1, numbers.max() + 1):
        places = np.flatnonzero(numbers == number)
        assert (np.diff(places) == 1).all()
        tokens = np.append(batch["tokens"][row][places], batch["targets"][row][places[-1]])
        yield tokens, batch["weights"][row][places]


@pytest.mark.parametrize("apart", [True, False])
def test_an_epoch_has_every_conversation_once_and_whole(data, apart):
    dataset = IndexedDataset(data / "chats/train")
    learned = LossSpans(dataset)
    expected = {dataset.document(i).tobytes(): i for i in range(len(dataset))}
    loader = rows_of(
        data,
        "chats",
        isolate_documents=apart,
        packing=None if apart else "pad",
        global_batch_size=1,
    )
    count = len(loader._packings[0])
    assert count < 40 if apart else count == 40
    for _ in range(2):
        seen = []
        for batch in (next(loader) for _ in range(count)):
            if not apart:
                size = int((batch["tokens"][0] > 0).sum())
                batch["documents"] = (np.arange(256) < size)[None].astype(np.int32)
            for tokens, weights in conversations_in(batch, 0):
                document = expected[tokens.astype(dataset.dtype).tobytes()]
                assert weights.tolist() == learned.mask(document, len(tokens))[1:].tolist()
                seen.append(document)
            assert not batch["weights"][batch["documents"] == 0].any()
        assert sorted(seen) == list(range(40))


def test_rows_are_joined_where_that_is_asked_for(data):
    batch = next(rows_of(data, "chats", packing="best_fit"))
    assert set(batch) == {"tokens", "targets", "weights"}
    assert (batch["tokens"] > 0).mean() > 0.8


@pytest.mark.parametrize("name", ["chats", "pairs"])
def test_any_rows_of_the_stream_are_the_same_after_a_restart(data, name):
    whole = rows_of(data, name, isolate_documents=True)
    batches = [next(whole) for _ in range(14)]
    # [1, 2]: the rejected answer of one pair and the chosen one of the next.
    for rows in ([0, 1, 2, 3], [0, 1], [2, 3], [1, 2], [3]):
        part = rows_of(data, name, isolate_documents=True, rows=np.array(rows))
        part.restore({**whole.state(), "step": 7})
        for expected in batches[7:]:
            got = next(part)
            for key, value in expected.items():
                np.testing.assert_array_equal(got[key], value[rows])


def test_rows_of_a_pair_are_the_chosen_and_the_rejected_answer(data):
    dataset = IndexedDataset(data / "pairs/train")
    learned = LossSpans(dataset)
    loader = rows_of(data, "pairs")
    seen = []
    for batch in (next(loader) for _ in range(10)):
        for row in (0, 2):
            size = int((batch["tokens"][row] > 0).sum())
            tokens = np.append(batch["tokens"][row][:size], batch["targets"][row][size - 1])
            for pair in range(20):
                if tokens.tolist() == dataset.document(2 * pair).tolist():
                    seen.append(pair)
            rejected = dataset.document(2 * seen[-1] + 1)
            assert batch["tokens"][row + 1][: len(rejected) - 1].tolist() == rejected[:-1].tolist()
            for each, document in ((row, 2 * seen[-1]), (row + 1, 2 * seen[-1] + 1)):
                mask = learned.mask(document, len(dataset.document(document)))
                assert batch["weights"][each].sum() == mask[1:].sum()
    assert sorted(seen) == list(range(20))


def test_a_pair_is_never_parted(data):
    with pytest.raises(DataError, match=r"make batch.global_batch_size / batch.microbatches even"):
        rows_of(data, "pairs", global_batch_size=3)


def test_text_and_conversations_are_blended_and_pairs_are_not(data):
    def part(name):
        return BlendPart(dataset=str(data / name / "train"), weight=1.0)

    settings = {"seq_len": 256, "global_batch_size": 2, "seed": 1, "isolate_documents": True}
    loader = Loader([part("chats"), part("texts")], **settings)
    batches = [next(loader) for _ in range(8)]
    texts = sum((batch["weights"].sum(axis=1) > 200).sum() for batch in batches)
    assert texts == 8  # half of the rows
    assert loader.state()["packing"] == ["best_fit, overlong: error", "concat"]
    with pytest.raises(DataError, match="a blend cannot mix preference pairs with other data"):
        Loader([part("chats"), part("pairs")], **settings)


def test_conversations_that_are_longer_are_refused_cut_or_left_out(data):
    settings = {"seq_len": 90, "global_batch_size": 1}
    with pytest.raises(
        DataError, match=r'of 40 documents are longer than batch.seq_len = 90 .*"truncate"'
    ):
        rows_of(data, "chats", **settings)
    for longer, words in (
        ("truncate", r"\d+ are cut, 0 are left out"),
        ("drop", r"0 are cut, \d+ are left out"),
    ):
        with pytest.warns(UserWarning, match=words):
            loader = rows_of(data, "chats", overlong=longer, **settings)
        sizes = np.diff(IndexedDataset(data / "chats/train").document_offsets)
        assert len(loader._packings[0]) == (40 if longer == "truncate" else (sizes <= 91).sum())
        assert all(next(loader)["weights"].any() for _ in range(40))
    with pytest.warns(UserWarning), pytest.raises(DataError, match="no document can be used"):
        rows_of(data, "chats", seq_len=30, global_batch_size=1, overlong="truncate")


def test_a_run_does_not_go_on_with_another_packing(data):
    state = rows_of(data, "chats", isolate_documents=True).state()
    with pytest.raises(DataError, match=r"packing was .*best_fit.* and is now .*pad"):
        rows_of(data, "chats", isolate_documents=True, packing="pad").restore(state)


def test_conversations_are_not_cut_like_text(data):
    with pytest.raises(DataError, match='"concat" supports only text'):
        rows_of(data, "chats", packing="concat")


@pytest.mark.parametrize("name", ["chats", "texts"])
def test_a_loss_of_pairs_refuses_what_holds_none(data, name):
    with pytest.raises(DataError, match="contains no preference pairs, which are required by"):
        rows_of(data, name, pairs=True)


def test_pairs_are_refused_by_a_loss_that_would_learn_both_answers(data):
    rows_of(data, "pairs", pairs=True).close()
    with pytest.raises(DataError, match="contains preference pairs, which require"):
        next(evaluation_batches(data / "pairs/train", batch_size=4, seq_len=256, pairs=False))


def test_text_may_stay_whole_too(data):
    batch = next(rows_of(data, "texts", packing="best_fit", isolate_documents=True))
    assert batch["weights"].sum(axis=1).tolist() == [200] * 4


def test_evaluation_sees_every_learned_token_once(data):
    for name in ("chats", "pairs"):
        prefix = data / name / "train"
        batches = list(evaluation_batches(prefix, batch_size=6, seq_len=256))
        total = sum(batch["weights"].sum() for batch in batches)
        assert total == LossSpans(IndexedDataset(prefix)).count()
        assert {batch["tokens"].shape for batch in batches} == {(6, 256)}


def test_a_token_outside_the_vocabulary_is_named_with_its_document(data):
    with pytest.raises(DataError, match=r"document \d+ contains token \d+, which is outside"):
        next(rows_of(data, "chats", vocab=100))
