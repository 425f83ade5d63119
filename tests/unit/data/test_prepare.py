import errno
import gzip
import json
import os
import subprocess
from typing import Any

import numpy as np
import pytest

from graphtrain.data.indexed.dataset import IndexedDataset
from graphtrain.data.indexed.description import dataset_tokenizer, read_description
from graphtrain.data.prepare import text as prepare_module
from graphtrain.data.prepare.text import prepare
from graphtrain.errors import DataError

TEXTS = [f"document {i}: the quick brown fox jumps over {i * i} lazy dogs" for i in range(200)]


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name != ".lease"}


def read_texts(prefix):
    dataset, tokenizer = IndexedDataset(prefix), dataset_tokenizer(prefix)
    assert tokenizer is not None
    return [tokenizer.decode(dataset.document(i).tolist()) for i in range(len(dataset))]


@pytest.mark.parametrize("tokenizer", ["bytes", "sentencepiece:300"])
def test_every_document_is_in_one_split_and_ends_with_the_mark(make_corpus, tmp_path, tokenizer):
    made = prepare([make_corpus(TEXTS)], tmp_path, tokenizer)
    splits = [read_texts(tmp_path / name) for name in ("train", "validation")]
    assert sorted(splits[0] + splits[1]) == sorted(TEXTS)
    assert [text for text in TEXTS if text in splits[0]] == splits[0]
    assert 0 < len(splits[1]) < 30
    dataset = IndexedDataset(tmp_path / "train")
    assert (dataset.tokens[dataset.document_offsets[1:] - 1] == made.train.eod).all()
    assert made.train == read_description(tmp_path / "train")
    assert (made.train.documents, made.train.tokens) == (len(dataset), len(dataset.tokens))


def test_workers_change_nothing_but_the_time(make_corpus, tmp_path, monkeypatch):
    monkeypatch.setattr("graphtrain.data.readers.records.GROUP_BYTES", 1000)
    corpus = make_corpus(TEXTS)
    for workers in (1, 2):
        prepare([corpus], tmp_path / str(workers), "sentencepiece:300", workers=workers)
    assert contents(tmp_path / "1") == contents(tmp_path / "2")


def test_preparing_again_does_nothing_wherever_the_corpus_is(make_corpus, tmp_path, monkeypatch):
    first = prepare([make_corpus(TEXTS)], tmp_path, "bytes")
    monkeypatch.setattr(prepare_module, "encode_chunks", None)
    again = prepare([make_corpus(TEXTS)], tmp_path, "bytes")
    assert (first.up_to_date, again.up_to_date) == (False, True)
    assert (again.train, again.validation) == (first.train, first.validation)


@pytest.mark.parametrize(
    "change",
    [{"seed": 1}, {"validation": 0.2}, {"append_eod": False}, {"tokenizer": "sentencepiece:300"}],
)
def test_another_setting_prepares_anew(make_corpus, tmp_path, change):
    corpus = make_corpus(TEXTS)
    prepare([corpus], tmp_path, "bytes")
    before = contents(tmp_path)
    assert not prepare(
        [corpus], tmp_path, **{"tokenizer": "bytes", **change}, replace=True
    ).up_to_date
    assert contents(tmp_path)["train.bin"] != before["train.bin"]


def test_another_corpus_or_a_damaged_result_prepares_anew(make_corpus, tmp_path):
    prepare([make_corpus(TEXTS)], tmp_path, "bytes")
    fewer = make_corpus(TEXTS[:-1])
    assert not prepare([fewer], tmp_path, "bytes", replace=True).up_to_date
    (tmp_path / "train.bin").write_bytes(b"")
    assert not prepare([fewer], tmp_path, "bytes").up_to_date
    (tmp_path / "manifest.json").write_text("{")
    assert not prepare([fewer], tmp_path, "bytes", replace=True).up_to_date


def test_without_validation_an_older_validation_set_is_removed(make_corpus, tmp_path):
    prepare([make_corpus(TEXTS)], tmp_path, "bytes")
    made = prepare([make_corpus(TEXTS)], tmp_path, "bytes", validation=0, replace=True)
    assert made.validation is None
    assert not list(tmp_path.glob("validation*"))
    assert read_texts(tmp_path / "train") == TEXTS


def test_the_tokenizer_learns_from_training_documents_only(make_corpus, tmp_path):
    rare = [f"{text} {chr(0x4E00 + i)}" for i, text in enumerate(TEXTS)]
    prepare([make_corpus(rare)], tmp_path / "a", "sentencepiece:600")
    held_out = set(read_texts(tmp_path / "a" / "validation"))
    changed = [text[::-1] if text in held_out else text for text in rare]
    prepare([make_corpus(changed)], tmp_path / "b", "sentencepiece:600")
    left, right = contents(tmp_path / "a"), contents(tmp_path / "b")
    assert left["tokenizer.model"] == right["tokenizer.model"]
    assert left["train.bin"] == right["train.bin"]
    assert left["validation.bin"] != right["validation.bin"]


def test_gzip_and_blank_lines_and_empty_documents_change_nothing(make_corpus, tmp_path):
    corpus = make_corpus(TEXTS)
    packed = tmp_path / "corpus.jsonl.gz"
    packed.write_bytes(gzip.compress(b"\n \n" + corpus.read_bytes()))
    prepare([packed], tmp_path / "packed", "bytes")
    prepare([make_corpus([*TEXTS, "", ""])], tmp_path / "empty", "bytes")
    prepare([corpus], tmp_path / "plain", "bytes")
    for name in ("train.bin", "train.idx", "validation.bin"):
        want = contents(tmp_path / "plain")[name]
        assert contents(tmp_path / "packed")[name] == contents(tmp_path / "empty")[name] == want


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"corpus\.jsonl: line 2: not JSON"),
        ("\xff", r"corpus\.jsonl: line 2: byte 0 is not UTF-8"),
        (
            "[1]",
            r"corpus\.jsonl: line 2: not a JSON object; give, for example, \{\"text\": \.\.\.\}",
        ),
        ('{"body": "x"}', r"corpus\.jsonl: line 2: no key 'text', only 'body'; choose a key with"),
        ('{"text": 3}', r"corpus\.jsonl: line 2: 'text' is not a string but int"),
        ('{"text": "\\ud800"}', r"corpus\.jsonl: line 2: 'text' is not valid Unicode"),
    ],
)
@pytest.mark.parametrize("tokenizer", ["bytes", "sentencepiece:300"])
def test_a_bad_line_is_named_and_nothing_is_left(tmp_path, line, message, tokenizer):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_bytes(b'{"text": "good"}\n' + line.encode("latin-1") + b"\n")
    with pytest.raises(DataError, match=message):
        prepare([corpus], tmp_path / "out", tokenizer)
    assert not (tmp_path / "out").exists()


def test_a_bad_line_found_by_a_worker_is_named(make_corpus, tmp_path):
    corpus = make_corpus([*TEXTS, {"text": None}])
    with pytest.raises(DataError, match=r"line 201: 'text' is not a string but NoneType"):
        prepare([corpus], tmp_path, "bytes", workers=2)


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        ([], {}, r"corpus\.jsonl: the corpus is empty"),
        (["", ""], {}, r"corpus\.jsonl: the corpus is empty"),
        (
            ["only one"],
            {},
            r"the validation split has 0 tokens and needs at least 2: --validation 0.05 "
            r"--seed 0 assigns 0 of 1 document to it; --split text holds out the end of each",
        ),
        (
            ["x"],
            {"validation": 0, "append_eod": False},
            "the train split has 1 token and needs at least 2",
        ),
        (TEXTS, {"validation": 1.0}, "validation = 1.0 is not a fraction"),
        (TEXTS, {"tokenizer": "sentencepiece:many"}, "give the vocabulary size"),
        (TEXTS, {"tokenizer": "sentencepiece:9999"}, "cannot train 9999 pieces"),
    ],
)
def test_a_corpus_that_cannot_be_used_says_why(make_corpus, tmp_path, texts, options, message):
    with pytest.raises(DataError, match=message):
        prepare([make_corpus(texts)], tmp_path, **{"tokenizer": "bytes", **options})
    assert not contents(tmp_path)


def test_a_missing_file_and_a_damaged_gzip_file_are_named(tmp_path):
    with pytest.raises(DataError, match=r"absent\.jsonl: No such file"):
        prepare([tmp_path / "absent.jsonl"], tmp_path / "out", "bytes")
    damaged = tmp_path / "damaged.jsonl.gz"
    damaged.write_bytes(gzip.compress(json.dumps({"text": "x" * 999}).encode())[:-9])
    with pytest.raises(
        DataError,
        match=r"damaged\.jsonl\.gz: after line 0, byte 0 of the decompressed text: damaged gzip",
    ):
        prepare([damaged], tmp_path / "out", "bytes")


def test_a_failure_keeps_what_the_directory_held(make_corpus, tmp_path):
    prepare([make_corpus(TEXTS)], tmp_path, "bytes")
    before = contents(tmp_path)
    with pytest.raises(DataError, match="line 201"):
        prepare([make_corpus([*TEXTS, 3])], tmp_path, "bytes", replace=True)
    assert contents(tmp_path) == before


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 kB."""
    place = tmp_path / "disk"
    place.mkdir()
    options = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)]
    try:
        subprocess.run(options, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a file system cannot be mounted here: {error}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_says_how_much_is_needed_and_leaves_nothing(
    make_corpus, small_disk, monkeypatch
):
    monkeypatch.setattr("graphtrain.data.readers.records.GROUP_BYTES", 1 << 16)
    corpus = make_corpus(["x" * 10_000] * 100)
    message = r"train\.bin: the disk is full after .* kB \(\d+% of the text\); about .*--output"
    with pytest.raises(DataError, match=message):
        prepare([corpus], small_disk, "bytes")
    assert not contents(small_disk)


def test_a_disk_that_fills_when_the_files_are_finished_is_the_same(
    make_corpus, tmp_path, monkeypatch
):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    message = r"train\.bin: the disk is full after \d+(\.\d+)? kB \(100% of the text\)"
    with pytest.raises(DataError, match=message):
        prepare([make_corpus(TEXTS)], tmp_path, "bytes")
    assert not contents(tmp_path)


def test_a_tokenizer_swapped_for_another_is_noticed(make_corpus, tmp_path):
    prepare([make_corpus(TEXTS)], tmp_path / "a", "sentencepiece:300")
    prepare([make_corpus(TEXTS)], tmp_path / "b", "sentencepiece:310")
    (tmp_path / "b" / "tokenizer.model").replace(tmp_path / "a" / "tokenizer.model")
    with pytest.raises(
        DataError, match=r"tokenizer\.model: not the tokenizer that .*train was made"
    ):
        dataset_tokenizer(tmp_path / "a" / "train")


def test_tokens_are_those_of_the_tokenizer(make_corpus, tmp_path):
    prepare([make_corpus(["é", "b"])], tmp_path, "bytes", validation=0)
    np.testing.assert_array_equal(
        IndexedDataset(tmp_path / "train").tokens, [0xC3, 0xA9, 256, 0x62, 256]
    )


def test_a_dataset_of_another_request_is_not_replaced_unasked(make_corpus, tmp_path):
    prepare([make_corpus(TEXTS)], tmp_path, "bytes")
    before = contents(tmp_path)
    with pytest.raises(DataError, match=r"differs in the text; .*--replace"):
        prepare([make_corpus(TEXTS[:-1])], tmp_path, "bytes")
    with pytest.raises(
        DataError, match=r"differs in --validation \(0.05, now 0.2\), --seed \(0, now 3\);"
    ):
        prepare([make_corpus(TEXTS)], tmp_path, "bytes", validation=0.2, seed=3)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(DataError, match=r"holds train.bin, and no manifest.json says"):
        prepare([make_corpus(TEXTS)], tmp_path, "bytes")
    assert contents(tmp_path) == {name: before[name] for name in before if name[0] != "m"}


def test_a_preparation_killed_after_its_files_may_be_repeated(make_corpus, tmp_path, monkeypatch):
    prepare([make_corpus(TEXTS[:-1])], tmp_path, "bytes")

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare_module.SplitWriters, "describe", killed)
    with pytest.raises(KeyboardInterrupt):
        prepare([make_corpus(TEXTS)], tmp_path, "bytes", replace=True)
    monkeypatch.undo()
    assert not prepare([make_corpus(TEXTS)], tmp_path, "bytes").up_to_date
    assert not (tmp_path / ".unfinished").exists()


def test_the_end_of_a_single_document_is_held_out(tmp_path):
    text = "".join(f"line {i}\n" for i in range(1000))
    (tmp_path / "book.txt").write_text(text)
    settings: Any = {"text_document": "file", "split_by": "text", "validation": 0.1, "test": 0.05}
    made = prepare([tmp_path / "book.txt"], tmp_path / "out", "chars", **settings)
    splits = [read_texts(tmp_path / "out" / name) for name in ("train", "validation", "test")]
    assert [len(documents) for documents in splits] == [1, 1, 1]
    assert "".join(documents[0] for documents in splits) == text.strip("\n")
    assert abs(len(splits[0][0]) - 0.85 * len(text)) < 2
    assert made.train.vocab == len(set(text)) + 2
    assert "line breaks" in str(made.omitted_text)


def test_validation_documents_come_from_their_files(make_corpus, tmp_path):
    train, held_out = make_corpus(TEXTS), make_corpus(["zebra Ω", "quick"])
    settings: Any = {"validation_from": [held_out]}
    made = prepare([train], tmp_path / "out", "chars", **settings)
    assert read_texts(tmp_path / "out" / "train") == TEXTS
    assert read_texts(tmp_path / "out" / "validation") == ["zebra \ufffd", "quick"]
    assert made.train.vocab == len(set("".join(TEXTS))) + 2
    assert prepare([train], tmp_path / "out", "chars", **settings).up_to_date
    with pytest.raises(DataError, match=r"differs in --validation-from;"):
        prepare([train, held_out], tmp_path / "out", "chars", validation=0)
    with pytest.raises(DataError, match="omit one"):
        prepare([train], tmp_path / "x", "bytes", validation=0.1, **settings)


def test_a_csv_file_is_said_not_to_be_read(tmp_path):
    (tmp_path / "rows.csv").write_text("text,other\nsome,1\n")
    with pytest.raises(DataError, match=r"rows.csv: .csv and .tsv files are not read; write each"):
        prepare([tmp_path / "rows.csv"], tmp_path / "data", "bytes")


def test_a_file_is_no_directory_for_the_datasets(tmp_path):
    text = tmp_path / "book.txt"
    text.write_text("some text")
    for output in (text, text / "data"):
        with pytest.raises(DataError, match=r"book.txt is a file; name a directory"):
            prepare([text], output, "bytes")


def test_a_preparation_that_fails_leaves_no_new_directory(tmp_path):
    (tmp_path / "a.jsonl").write_text("no JSON")
    (tmp_path / "old").mkdir()
    for output in (tmp_path / "new" / "inner", tmp_path / "old"):
        with pytest.raises(DataError, match="not JSON"):
            prepare([tmp_path / "a.jsonl"], output, "bytes")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "old"]
