"""Every format gives the same documents, from the beginning and from any place in between."""

import gzip
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphtrain.data.prepare.text import prepare
from graphtrain.data.readers import records
from graphtrain.data.readers.corpus import TEST, TRAIN, VALIDATION, Corpus
from graphtrain.errors import DataError

TEXTS = [f"document {i}: été\nof two lines" for i in range(60)]


def as_json() -> bytes:
    return b"".join(json.dumps({"text": text, "n": 1}).encode() + b"\n" for text in TEXTS)


def write_jsonl(path: Path) -> Path:
    path.write_bytes(as_json())
    return path


def write_gz(path: Path) -> Path:
    path.write_bytes(gzip.compress(as_json()[:999]) + gzip.compress(as_json()[999:]))
    return path


def write_zst(path: Path) -> Path:
    zstd = pytest.importorskip("backports.zstd" if sys.version_info < (3, 14) else "compression")
    path.write_bytes(zstd.compress(as_json()[:999]) + zstd.compress(as_json()[999:]))
    return path


def write_parquet(path: Path) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({"n": [1] * len(TEXTS), "text": TEXTS})
    pytest.importorskip("pyarrow.parquet").write_table(table, path, row_group_size=7)
    return path


def write_arrow(path: Path) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({"text": TEXTS, "n": [1] * len(TEXTS)})
    with pyarrow.ipc.new_file(str(path), table.schema) as file:
        file.write_table(table, max_chunksize=7)
    return path


def write_folder(path: Path) -> Path:
    """As `datasets.Dataset.save_to_disk(path, num_shards=2)`; compared below, where it is here."""
    pyarrow = pytest.importorskip("pyarrow")
    path.mkdir()
    names = [f"data-{number:05}-of-00002.arrow" for number in range(2)]
    for name, texts in zip(names, (TEXTS[:31], TEXTS[31:]), strict=True):
        table = pyarrow.table({"text": texts})
        with pyarrow.ipc.new_stream(str(path / name), table.schema) as file:
            file.write_table(table, max_chunksize=7)
    (path / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": name} for name in names]})
    )
    return path


def write_text(path: Path) -> Path:
    path.write_text("\n" + "\n \n\n".join(TEXTS) + "\n")
    return path


FORMATS = {
    "c.jsonl": write_jsonl,
    "c.jsonl.gz": write_gz,
    "c.jsonl.zst": write_zst,
    "c.parquet": write_parquet,
    "c.arrow": write_arrow,
    "c.hf": write_folder,
    "c.txt": write_text,
}


def read(corpus: Corpus, *start) -> list[str]:
    return [text for chunk in corpus.chunks(*start) for text in corpus.texts(chunk)]


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_its_documents_from_any_place(tmp_path, monkeypatch, name):
    monkeypatch.setattr(records, "GROUP_BYTES", 100)
    path = FORMATS[name](tmp_path / name)
    other = write_jsonl(tmp_path / "last.jsonl")
    corpus = Corpus.from_inputs([path, other])
    assert read(corpus) == TEXTS * 2
    chunks = list(corpus.chunks())
    assert len(chunks) > 20
    assert chunks[-1].bytes_read == corpus.nbytes
    reads = [chunk.bytes_read for chunk in chunks]
    assert reads == sorted(reads)
    for index in range(0, len(chunks), 5):
        after = list(corpus.chunks(chunks[index].next_position))
        assert after == chunks[index + 1 :]


@pytest.mark.parametrize(
    ("document", "want"),
    [
        ("line", ["a", "b", "c", "d"]),
        ("paragraph", ["a\nb", "c", "d"]),
        ("file", ["a\nb\n \nc\n\n\nd"]),
    ],
)
def test_a_text_file_has_documents_of_the_sort_asked_for(tmp_path, document, want):
    for name, write in (("t.txt", Path.write_bytes), ("t.txt.gz", _write_packed)):
        write(tmp_path / name, b"\na\nb\n \nc\n\n\nd\n")
        corpus = Corpus.from_inputs([tmp_path / name], text_document=document)
        assert read(corpus) == want
        assert [chunk.line_numbers[0] for chunk in corpus.chunks()] == [
            1 if document == "file" else 2
        ]


def _write_packed(path: Path, text: bytes) -> None:
    path.write_bytes(gzip.compress(text))


def test_a_folder_is_one_that_datasets_saves(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    saved = datasets.Dataset.from_dict({"text": TEXTS})
    saved.save_to_disk(str(tmp_path / "one"), num_shards=2)
    datasets.DatasetDict({"train": saved, "test": saved}).save_to_disk(str(tmp_path / "two"))
    assert read(Corpus.from_inputs([tmp_path / "one"])) == TEXTS
    assert read(Corpus.from_inputs([tmp_path / "two" / "test"])) == TEXTS
    with pytest.raises(
        DataError,
        match=r"two: contains the splits train, test; name one of them, for example .*train",
    ):
        Corpus.from_inputs([tmp_path / "two"])


def test_a_folder_of_another_sort_says_so(tmp_path):
    with pytest.raises(DataError, match=r"is a folder without state\.json.*name the files in it"):
        Corpus.from_inputs([tmp_path])
    (tmp_path / "state.json").write_text("[]")
    with pytest.raises(
        DataError, match=r"state\.json: not the state\.json of a folder saved by datasets"
    ):
        Corpus.from_inputs([tmp_path])


def test_texts_of_several_keys_are_joined_by_a_blank_line(make_corpus):
    path = make_corpus([{"title": "A", "body": "b"}, {"title": "C", "body": ""}])
    assert read(Corpus.from_inputs([path], keys=("title", "body"))) == ["A\n\nb", "C\n\n"]


def test_a_table_without_the_column_or_with_other_values_says_so(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "c.parquet"
    parquet.write_table(pyarrow.table({"body": ["x", None, "y"]}), path)
    with pytest.raises(
        DataError, match=r"c\.parquet: no column 'text', only 'body'; choose a column"
    ):
        read(Corpus.from_inputs([path]))
    with pytest.raises(DataError, match=r"row 2: 'body' is not a string but NoneType"):
        read(Corpus.from_inputs([path], keys=("body",)))


def test_hooks_change_and_drop_documents_in_their_order(make_corpus, tmp_path, monkeypatch):
    (tmp_path / "hooks_of_this_test.py").write_text(
        "def shout(text): return text.upper()\n"
        "def long_only(text): return text if len(text) > 1 else None\n"
        "def wrong(text): return 1\n"
        "def fails(text): return text[9]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    path = make_corpus(["ab", "c", "de"])
    hooks = ("hooks_of_this_test:shout", "hooks_of_this_test:long_only")
    assert read(Corpus.from_inputs([path], clean=hooks)) == ["AB", "", "DE"]
    for hook, message in (
        ("hooks_of_this_test:wrong", r"line 1: --clean .*:wrong returned int, neither"),
        ("hooks_of_this_test:fails", r"line 1: --clean .*:fails raised IndexError: string index"),
        ("hooks_of_this_test:absent", r"--clean .*: module .* has no attribute 'absent'"),
        ("no_such_module:x", r"--clean no_such_module:x: No module named"),
        ("shout", r"--clean shout: give MODULE:FUNCTION"),
    ):
        with pytest.raises(DataError, match=message):
            read(Corpus.from_inputs([path], clean=(hook,)))


def test_an_edited_hook_prepares_anew(make_corpus, tmp_path, monkeypatch):
    source = tmp_path / "hook_that_is_edited.py"
    source.write_text("def clean(text): return text\n")
    monkeypatch.syspath_prepend(tmp_path)
    options = {"clean": ["hook_that_is_edited:clean"], "validation": 0, "replace": True}
    corpus = make_corpus(TEXTS)
    assert not prepare([corpus], tmp_path / "out", "bytes", **options).up_to_date
    assert prepare([corpus], tmp_path / "out", "bytes", **options).up_to_date
    source.write_text("def clean(text): return text  # edited\n")
    assert not prepare([corpus], tmp_path / "out", "bytes", **options).up_to_date


@given(validation=st.floats(0, 0.6), test=st.floats(0, 0.39), seed=st.integers(0, 9))
@settings(max_examples=20, deadline=None)
def test_splits_have_about_their_fractions_and_stay_when_others_change(
    make_corpus, validation, test, seed
):
    corpus = Corpus.from_inputs(
        [make_corpus(["x"] * 2000)], validation=validation, test=test, seed=seed
    )
    (chunk,) = corpus.chunks()
    split = corpus.split(chunk)
    for number, fraction in (
        (VALIDATION, validation),
        (TEST, test),
        (TRAIN, 1 - validation - test),
    ):
        assert abs((split == number).mean() - fraction) < 0.06
    without = Corpus.from_inputs(corpus.paths, validation=validation, seed=seed).split(chunk)
    assert ((split == VALIDATION) == (without == VALIDATION)).all()


def test_fractions_leave_something_to_train_on(make_corpus):
    path = make_corpus(["x"])
    with pytest.raises(DataError, match="--validation and --test hold out every document"):
        Corpus.from_inputs([path], validation=0.5, test=0.5)
    with pytest.raises(DataError, match=r"test = 1\.5 is not a fraction"):
        Corpus.from_inputs([path], test=1.5)


def damaged(path: Path, place: float, bits: int) -> None:
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= bits
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["c.jsonl", "c.jsonl.gz", "c.jsonl.zst", "c.parquet", "c.arrow"])
def test_a_damaged_file_gives_documents_or_an_error_that_names_it_and_the_place(tmp_path, name):
    whole = FORMATS[name](tmp_path / name).read_bytes()
    random = np.random.default_rng(0)
    errors = 0
    for _ in range(150):
        (tmp_path / name).write_bytes(whole)
        if random.random() < 0.2:
            (tmp_path / name).write_bytes(whole[: int(random.random() * len(whole))])
        else:
            damaged(tmp_path / name, random.random(), int(random.integers(1, 256)))
        try:
            read(Corpus.from_inputs([tmp_path / name]))
        except DataError as error:
            errors += 1
            assert name in str(error)
            assert any(word in str(error) for word in ("line ", "row ", "column "))
    assert errors > 30
