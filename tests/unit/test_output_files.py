"""No command replaces a file that it did not write; the same output again is no error."""

import json
from pathlib import Path

import pytest
from in_process import graphtrain

from graphtrain.cli.options import check_output, write_file, write_report
from graphtrain.data.indexed.merge import merge
from graphtrain.data.prepare.text import prepare
from graphtrain.data.samples.text import write_sample
from graphtrain.errors import DataError
from graphtrain.files import OutputExists


def test_a_sample_replaces_no_other_file(tmp_path):
    path = tmp_path / "corpus.jsonl"
    write_sample(path, include=["topics"], limit=50_000)
    write_sample(path, include=["topics"], limit=50_000)
    before = path.read_bytes()
    with pytest.raises(OutputExists, match=r"corpus.jsonl exists already .*; remove it or choose"):
        write_sample(path, include=["topics"], limit=60_000)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["corpus.jsonl"]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that takes no files")
def test_an_output_that_cannot_be_written_is_named_as_it_was_asked_for():
    with pytest.raises(DataError, match=r"^/proc/corpus.jsonl: "):
        write_sample("/proc/corpus.jsonl", include=["topics"], limit=50_000)


def test_a_merge_replaces_no_dataset(make_corpus, tmp_path):
    prepare([make_corpus(["some text", "more text"])], tmp_path, "bytes", validation=0)
    merge([tmp_path / "train"] * 2, tmp_path / "both")
    with pytest.raises(DataError, match=r"both"):
        merge([tmp_path / "train"] * 2, tmp_path / "both")


def test_a_tokenizer_replaces_no_other_tokenizer(make_corpus, tmp_path):
    corpus = make_corpus([f"document {i}: the quick brown fox" for i in range(200)])
    train = ["data", "tokenizer", corpus, "--output", tmp_path / "t", "--vocab"]
    assert graphtrain(*train, 290).status == graphtrain(*train, 290).status == 0
    ended = graphtrain(*train, 289)
    assert ended.status == 2 and "tokenizer.model exists already" in ended.err


def test_outputs_of_options_replace_only_their_own(tmp_path):
    path = tmp_path / "file"
    write_file(path, "a")
    write_file(path, "a")
    with pytest.raises(OutputExists, match="file exists already"):
        write_file(path, "b")
    write_report(tmp_path / "report.json", {"graphs": 1}, indent=2)
    write_report(tmp_path / "report.json", {"graphs": 2}, indent=2)
    assert json.loads((tmp_path / "report.json").read_text()) == {"graphs": 2}
    with pytest.raises(OutputExists):
        write_report(path, {"graphs": 2}, indent=2)
    check_output(tmp_path / "absent", "mark")


def test_a_strategy_replaces_no_other_file(tmp_path):
    (tmp_path / "thesis.json").write_text("{}")
    ended = graphtrain(
        "plan",
        "examples/quickstart.toml",
        "--no-compile",
        "--save-strategy",
        tmp_path / "thesis.json",
    )
    assert ended.status == 2 and "thesis.json exists already" in ended.err
    assert (tmp_path / "thesis.json").read_text() == "{}"


def test_a_search_refuses_another_file_before_its_work(tmp_path, monkeypatch):
    monkeypatch.setattr("graphtrain.planning.search.search", None)
    (tmp_path / "book.txt").write_text("a book")
    search = ["plan", "search", "examples/quickstart.toml", "--output"]
    ended = graphtrain(*search, tmp_path / "book.txt")
    assert ended.status == 2 and "book.txt exists already" in ended.err


def test_a_lock_replaces_only_a_lock(tmp_path):
    (tmp_path / "notes.plan").write_text("notes")
    lock = ["plan", "lock", "examples/quickstart.toml", "--no-compile", "--output"]
    ended = graphtrain(*lock, tmp_path / "notes.plan")
    assert ended.status == 2 and "notes.plan exists already" in ended.err
