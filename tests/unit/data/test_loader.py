import itertools
import json
import subprocess
import sys
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphtrain.data.batches.concat_packing import ConcatPacking
from graphtrain.data.batches.evaluation_batches import evaluation_batches
from graphtrain.data.batches.loader import Loader
from graphtrain.data.indexed.dataset import IndexedDataset
from graphtrain.errors import DataError

DOCUMENTS = [[100 * i + j for j in range(3 + i % 5)] for i in range(40)]
SHAPE = {"global_batch_size": 8, "seq_len": 6, "seed": 3}


@pytest.fixture(scope="module")
def prefix(make_dataset):
    return make_dataset(DOCUMENTS, 4001)


def take(loader: Loader, count: int) -> dict[str, np.ndarray]:
    batches = list(itertools.islice(loader, count))
    loader.close()
    return {name: np.stack([batch[name] for batch in batches]) for name in batches[0]}


def assert_equal(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    for name in ("tokens", "targets", "weights"):
        np.testing.assert_array_equal(got[name], want[name])


def test_batches_have_the_shapes_and_dtypes_of_the_step(prefix):
    batch = take(Loader(prefix, **SHAPE), 1)
    assert {name: (array.shape, array.dtype.name) for name, array in batch.items()} == {
        "tokens": ((1, 8, 6), "int32"),
        "targets": ((1, 8, 6), "int32"),
        "weights": ((1, 8, 6), "float32"),
    }


@pytest.mark.parametrize("rows", [range(4), [6, 7], [1], [0, 3, 4, 7]])
def test_some_rows_are_those_of_the_whole_batch(prefix, rows):
    want = take(Loader(prefix, **SHAPE), 12)
    got = take(Loader(prefix, **SHAPE, rows=np.array(rows)), 12)
    assert_equal(got, {name: array[:, np.array(rows)] for name, array in want.items()})


def test_only_the_sequences_of_its_rows_are_read(prefix, monkeypatch):
    read_by, slices_of = defaultdict(set), ConcatPacking._document_slices

    def noted(packing, index):  # other tests' loaders may still read ahead
        read_by[packing].add(index)
        return slices_of(packing, index)

    monkeypatch.setattr(ConcatPacking, "_document_slices", noted)
    loader = Loader(prefix, **SHAPE, rows=np.array([2, 5]))
    for _ in range(3):
        next(loader)
    loader.close()
    own = [{int(index) for _, index in loader._samples_of(step, [2, 5])} for step in range(30)]
    read = read_by[loader._packings[0]]
    assert set().union(*own[:3]) <= read <= set().union(*own)


@given(rows=st.sets(st.integers(0, 4), min_size=1), sequences=st.integers(1, 40))
@settings(max_examples=20, deadline=None)
def test_evaluation_of_some_rows_has_the_rows_of_the_whole_batches(make_dataset, rows, sequences):
    prefix = make_dataset([list(range(sequences * 3))], 200)
    chosen = np.array(sorted(rows))
    whole = list(evaluation_batches(prefix, batch_size=5, seq_len=4))
    some = list(evaluation_batches(prefix, batch_size=5, seq_len=4, rows=chosen))
    for got, want in zip(some, whole, strict=True):
        assert_equal(got, {name: array[chosen] for name, array in want.items()})


@given(step=st.integers(0, 25), rows=st.sets(st.integers(0, 7), min_size=1))
@settings(max_examples=8, deadline=None)
def test_a_restored_loader_continues_exactly(prefix, step, rows):
    first = Loader(prefix, **SHAPE)
    list(itertools.islice(first, step))
    state = json.loads(json.dumps(first.state()))
    want = take(first, 3)

    chosen = np.array(sorted(rows))
    restored = Loader(prefix, **SHAPE, rows=chosen)
    restored.restore(state)
    assert_equal(take(restored, 3), {name: array[:, chosen] for name, array in want.items()})
    assert_equal(take(Loader(prefix, **SHAPE, start_step=step), 3), want)


def test_restoring_after_some_steps_goes_back(prefix):
    loader = Loader(prefix, **SHAPE)
    start = loader.state()
    want = list(itertools.islice(loader, 5))
    loader.restore(start)
    assert loader.state()["step"] == 0
    for batch, other in zip(want, loader, strict=False):
        assert_equal(other, batch)
    loader.close()


def test_every_epoch_takes_every_sequence_once_and_in_another_order(make_dataset):
    prefix = make_dataset([list(range(i * 16, i * 16 + 16)) for i in range(16)], 256)
    batches = take(Loader(prefix, global_batch_size=4, seq_len=16, seed=1), 8)
    epochs = batches["targets"].reshape(2, -1), batches["weights"].reshape(2, -1)
    seen = [targets[weights == 1] for targets, weights in zip(*epochs, strict=True)]
    assert [len(np.unique(targets)) for targets in seen] == [255, 255]
    assert seen[0].tolist() != seen[1].tolist()


def continued(loader: Loader, **shape) -> Loader:
    """Return a loader with another batch that continues where one stopped."""
    other = Loader(loader._packings[0].dataset.prefix, **shape)
    other.continue_from(json.loads(json.dumps(loader.state())))
    loader.close()
    return other


def test_a_batch_that_grows_reads_every_sequence_of_an_epoch_once(make_dataset):
    prefix = make_dataset([list(range(i * 16, i * 16 + 16)) for i in range(16)], 256)
    first = Loader(prefix, global_batch_size=2, seq_len=16, seed=1)
    small = list(itertools.islice(first, 2))
    second = continued(first, global_batch_size=4, seq_len=16, seed=1)
    large = take(second, 3)
    whole = take(Loader(prefix, global_batch_size=16, seq_len=16, seed=1), 1)
    rows = np.concatenate([*(batch["targets"] for batch in small), *large["targets"]])
    assert rows.tolist() == whole["targets"][0].tolist()


def test_a_position_after_another_batch_restores_exactly(prefix):
    first = Loader(prefix, **SHAPE)
    list(itertools.islice(first, 3))
    grown = {**SHAPE, "global_batch_size": 12}
    second = continued(first, **grown)
    next(second)
    state = json.loads(json.dumps(second.state()))
    assert (state["step"], state["sample"]) == (4, 3 * 8 + 12)
    want, documents = take(second, 3), second.documents(5)[prefix].tolist()
    restored = Loader(prefix, **grown)
    restored.restore(state)
    assert restored.documents(5)[prefix].tolist() == documents
    assert_equal(take(restored, 3), want)


def test_longer_sequences_begin_after_as_many_tokens(prefix):
    first = Loader(prefix, **SHAPE)
    list(itertools.islice(first, 3))
    second = continued(first, **{**SHAPE, "seq_len": 10})  # 3 x 8 x 6 tokens are 14.4 sequences
    assert second.state()["sample"] == 15
    second.close()


def test_other_data_cannot_be_continued(prefix, make_dataset):
    first = Loader(prefix, **SHAPE, start_step=7)
    other = Loader(make_dataset([[1, 2, 3] * 9], 4), **{**SHAPE, "global_batch_size": 2})
    with pytest.raises(DataError, match="cannot resume at step 7: documents was"):
        other.continue_from(first.state())
    damaged = first.state() | {"sample": -1}
    with pytest.raises(DataError, match="the position of the data is damaged: its sample is -1"):
        first.restore(damaged)
    first.close(), other.close()


def test_seeds_give_other_streams(prefix):
    streams = [
        take(Loader(prefix, global_batch_size=8, seq_len=6, seed=s), 3)["tokens"] for s in (0, 1)
    ]
    assert (streams[0] != streams[1]).any()


def test_the_stream_is_the_one_that_earlier_versions_gave(prefix):
    """If this fails, runs resumed under the new code or the new Grain see other data."""
    tokens = take(Loader(prefix, **SHAPE), 2)["tokens"]
    assert tokens[:, :3, 0].tolist() == [[3102, 1803, 3901], [2600, 405, 1100]]


def test_the_documents_of_a_step_are_those_of_its_tokens(prefix):
    loader = Loader(prefix, **SHAPE, rows=np.array([1]))
    batches = take(Loader(prefix, **SHAPE), 9)
    for step in range(9):
        scored = batches["weights"][step] == 1
        tokens = np.concatenate([batches[n][step][scored] for n in ("tokens", "targets")])
        assert loader.documents(step)[prefix].tolist() == np.unique(tokens // 100).tolist()
    loader.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 4}, "seed was 3 and is now 4"),
        ({"global_batch_size": 16}, "global_batch_size was 8 and is now 16"),
        ({"seq_len": 5}, "seq_len was 6 and is now 5"),
    ],
)
def test_a_position_of_another_stream_is_refused(prefix, change, message):
    loader = Loader(prefix, **SHAPE, start_step=7)
    other = Loader(prefix, **{**SHAPE, **change})
    with pytest.raises(DataError, match=f"cannot resume at step 7: {message}"):
        other.restore(loader.state())
    loader.close()
    other.close()


def test_a_position_in_another_dataset_is_refused(prefix, make_dataset):
    loader = Loader(prefix, **SHAPE)
    other = Loader(make_dataset(DOCUMENTS[:-1], 4001), **SHAPE)
    with pytest.raises(DataError, match="documents was 40 and is now 39"):
        other.restore(loader.state())
    loader.close()
    other.close()


def test_a_token_outside_the_vocabulary_stops_the_loader(prefix):
    loader = Loader(prefix, **SHAPE, vocab=3000)
    with pytest.raises(DataError, match=r"train: document 3\d contains token 3\d\d\d.* of 3000"):
        list(itertools.islice(loader, 20))
    loader.close()


@given(tokens=st.integers(2, 60), sequences=st.integers(1, 5), length=st.integers(1, 9))
@settings(max_examples=40, deadline=None)
def test_evaluation_scores_every_token_but_the_first_once(make_dataset, tokens, sequences, length):
    prefix = make_dataset([list(range(tokens))], 100)
    batches = list(evaluation_batches(prefix, batch_size=sequences, seq_len=length))
    assert {batch["tokens"].shape for batch in batches} == {(sequences, length)}
    scored = np.concatenate([batch["targets"][batch["weights"] == 1] for batch in batches])
    assert scored.tolist() == list(range(1, tokens))
    assert len(batches) == -(-len(ConcatPacking(IndexedDataset(prefix), length)) // sequences)


def test_modules_other_than_a_loader_do_not_import_grain():
    code = (
        "import sys, graphtrain.data.prepare.text, graphtrain.run.bigram_baseline\n"
        "import graphtrain.data.batches.loader\n"
        "assert not {'grain', 'jax', 'sentencepiece'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_padding_comes_after_the_sequences_of_a_step_and_has_no_weight(prefix):
    want = take(Loader(prefix, **SHAPE), 3)
    got = take(Loader(prefix, **SHAPE, padding_sequences=4), 3)
    assert_equal({name: array[:, :8] for name, array in got.items()}, want)
    assert got["weights"].shape == (3, 12, 6) and not got["weights"][:, 8:].any()
    rows = np.array([0, 7, 8, 11])
    some = take(Loader(prefix, **SHAPE, padding_sequences=4, rows=rows), 3)
    assert_equal(some, {name: array[:, rows] for name, array in got.items()})


def test_an_evaluation_ends_after_its_limit_whatever_the_batch(prefix):
    def targets(batch_size: int) -> np.ndarray:
        batches = evaluation_batches(prefix, batch_size=batch_size, seq_len=6, limit=8)
        rows = np.concatenate([batch["targets"][batch["weights"].any(1)] for batch in batches])
        return rows

    assert len(targets(4)) == 8
    np.testing.assert_array_equal(targets(3), targets(4))
