import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from graphtrain.cli.data import command
from graphtrain.data.indexed import merge as merge_module
from graphtrain.data.indexed.dataset import IndexedDataset
from graphtrain.data.indexed.description import read_description
from graphtrain.data.indexed.merge import merge
from graphtrain.data.indexed.verify import verify
from graphtrain.data.prepare.text import prepare
from graphtrain.errors import DataError

documents_strategy = st.lists(st.lists(st.integers(0, 300), max_size=9), max_size=9).filter(any)


def documents_of(prefix) -> list[list[int]]:
    dataset = IndexedDataset(prefix)
    return [dataset.document(i).tolist() for i in range(len(dataset))]


@given(parts=st.lists(documents_strategy, min_size=1, max_size=4), copied=st.sampled_from([3, 99]))
@settings(max_examples=30, deadline=None)
def test_a_merged_dataset_holds_the_documents_of_all_in_order(make_dataset, parts, copied):
    prefixes = [make_dataset(documents, 301) for documents in parts]
    output = Path(prefixes[0]).with_name("merged")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merge_module, "_TOKENS", copied)
        assert merge(prefixes, output) is None
    assert documents_of(output) == [document for documents in parts for document in documents]


def test_a_description_and_its_tokenizer_go_with_the_dataset(make_corpus, tmp_path):
    for name in ("a", "b"):
        prepare([make_corpus([f"{name} {i}" for i in range(99)])], tmp_path / name, "bytes")
    made = merge([tmp_path / "a" / "train", tmp_path / "b" / "train"], tmp_path / "both" / "train")
    assert made == read_description(tmp_path / "both" / "train")
    assert made is not None and made.documents == len(documents_of(tmp_path / "both" / "train"))
    assert verify(tmp_path / "both" / "train")["documents"] == made.documents


def test_datasets_that_do_not_belong_together_are_refused(make_dataset, make_corpus, tmp_path):
    small, large = make_dataset([[1]], 10), make_dataset([[1]], 99_999)
    with pytest.raises(
        DataError, match=r"has tokens of int32 and .* of uint16; prepare both with the same"
    ):
        merge([small, large], tmp_path / "x")
    corpus = make_corpus(
        [f"document {i}: a quick brown fox jumps over {i * i} dogs" for i in range(200)]
    )
    prepare([corpus], tmp_path / "a", "bytes")
    prepare([corpus], tmp_path / "b", "sentencepiece:300")
    with pytest.raises(DataError, match="different tokenizers or end-of-document tokens"):
        merge([tmp_path / "a" / "train", tmp_path / "b" / "train"], tmp_path / "x")
    prepare([corpus], tmp_path / "c", "sentencepiece:310")
    with pytest.raises(
        DataError, match=r"tokenizer\.model: is a different tokenizer; choose another"
    ):
        merge([tmp_path / "b" / "train"], tmp_path / "c" / "more")
    assert not list(tmp_path.glob("x*"))


@pytest.fixture
def prepared(make_corpus, tmp_path):
    prepare([make_corpus(["some text", "more text"])], tmp_path, "bytes", validation=0)
    return tmp_path / "train"


def overwrite(path: str, place: int, value: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(place)
        file.write(value)


def edit(prefix, **changes) -> None:
    path = Path(f"{prefix}.json")
    fields = json.loads(path.read_text()) | changes
    fields.pop("digest", None)  # of the description itself, as in those of earlier versions
    path.write_text(json.dumps(fields))


def test_verify_reads_what_is_sound(prepared):
    result = CliRunner().invoke(command, ["verify", str(prepared)], catch_exceptions=False)
    assert result.stdout == f"{prepared}: 2 documents, 20 tokens, intact\n"


@pytest.mark.parametrize("place", range(40))
def test_verify_notices_every_changed_byte_of_the_tokens(prepared, place):
    before = Path(f"{prepared}.bin").read_bytes()[place]
    overwrite(f"{prepared}.bin", place, bytes([before ^ 1]))
    with pytest.raises(DataError, match=r"train\.bin: "):
        verify(prepared)


def test_verify_names_the_byte_and_the_document(prepared):
    overwrite(f"{prepared}.bin", 24, b"\xff\xff")
    with pytest.raises(DataError, match=r"train\.bin: byte 24: document 1 contains token 65535"):
        verify(prepared)
    overwrite(f"{prepared}.bin", 24, b"x\0")
    overwrite(f"{prepared}.bin", 18, b"x\0")
    with pytest.raises(
        DataError,
        match=r"byte 18: document 0 ends with token 120, not with the end-of-document token 256",
    ):
        verify(prepared)


def test_verify_compares_what_the_description_says(prepared):
    edit(prepared, tokens=21)
    with pytest.raises(DataError, match=r"train\.json: records 21 tokens, but the dataset has 20"):
        verify(prepared)
    edit(prepared, tokens=20, digests={"bin": "0", "idx": "0"})
    with pytest.raises(
        DataError, match=r"train\.bin: its digest differs from the one in train\.json"
    ):
        verify(prepared)


def test_verify_takes_a_vocabulary_where_there_is_no_description(make_dataset):
    prefix = make_dataset([[1, 2], [3]], 10)
    assert verify(prefix) == {"documents": 2, "tokens": 3}
    with pytest.raises(
        DataError, match=r"byte 4: document 1 contains token 3, which is outside a voc"
    ):
        verify(prefix, vocab=3)


def test_an_input_and_an_existing_dataset_are_not_overwritten_unasked(make_dataset, tmp_path):
    first, second = make_dataset([[1]], 10), make_dataset([[2]], 10)
    with pytest.raises(DataError, match="is also an input; choose another --output"):
        merge([first, second], Path(first).parent / "." / Path(first).name, replace=True)
    merge([first, second], tmp_path / "both")
    with pytest.raises(DataError, match=r"both.bin exists already; .* replace it with --replace"):
        merge([second], tmp_path / "both")
    assert documents_of(first) == [[1]] and documents_of(tmp_path / "both") == [[1], [2]]
    merge([second], tmp_path / "both", replace=True)
    assert documents_of(tmp_path / "both") == [[2]]
