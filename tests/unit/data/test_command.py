import json

import pytest
from click.testing import CliRunner

from graphtrain.cli.data import command
from graphtrain.errors import DataError


def call(*arguments):
    result = CliRunner().invoke(command, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def test_sample_prepare_and_inspect_follow_one_another(tmp_path):
    corpus, output = tmp_path / "corpus.jsonl", tmp_path / "out"
    assert "0.2 MB" in call("sample", corpus, "--megabytes", 0.2).stderr
    arguments = ("prepare", corpus, "--output", output, "--tokenizer", "sentencepiece:500")
    made = call(*arguments)
    assert made.stdout == ""
    assert "out/validation: " in made.stderr
    assert "up to date, nothing to do" in call(*arguments).stderr

    facts = json.loads(call("inspect", output / "train", "--json").stdout)
    assert facts["tokens"] > facts["documents"] > 10
    assert (facts["dtype"], facts["vocab"], facts["eod"]) == ("uint16", 500, 2)
    assert facts["text"] in json.loads(corpus.read_text().splitlines()[0])["text"]
    assert f"tokens: {facts['tokens']}\n" in call("inspect", output / "train").stdout


def test_inspect_reads_datasets_without_a_description(make_dataset):
    facts = json.loads(call("inspect", make_dataset([[1, 2], [3]], 10), "--json").stdout)
    assert (facts["documents"], facts["tokens"], facts["text"]) == (2, 3, None)


def test_errors_are_raised_for_the_root_command_to_print(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        call("inspect", tmp_path / "absent")


@pytest.mark.parametrize(
    ("kind", "word"), [("instructions", "conversations"), ("preferences", "pairs")]
)
def test_sample_instruct_and_preview_follow_one_another(tmp_path, kind, word):
    corpus, output = tmp_path / "corpus.jsonl", tmp_path / "out"
    call("sample", corpus, "--kind", kind, "--megabytes", 0.02)
    arguments = ("--output", output, "--tokenizer", "bytes", "--chat-template", "chatml")
    made = call("instruct", corpus, *arguments)
    assert f"{word}, " in made.stderr and "encoded as ordinary text" in made.stderr
    shown = call("preview", output / "train", "--documents", 1, "--length", 4096).stdout
    assert shown.startswith("document 0: ") and "rows, " in shown
    learned = shown.split(">>>")[1].split("<<<")[0]
    first = json.loads(corpus.read_text().splitlines()[0])
    answer = first["chosen"] if word == "pairs" else first["messages"][1]["content"]
    assert learned == answer + "<|im_end|>"
    with pytest.raises(DataError, match="has documents 0 to"):
        call("preview", output / "train", "--first", 10_000)


def test_learned_text_is_green_on_a_terminal(tmp_path, monkeypatch):
    corpus, output = tmp_path / "corpus.jsonl", tmp_path / "out"
    call("sample", corpus, "--kind", "instructions", "--megabytes", 0.02)
    call(
        "instruct", corpus, "--output", output, "--tokenizer", "bytes", "--chat-template", "alpaca"
    )
    monkeypatch.setattr("graphtrain.cli.data.supports_color", lambda: True)
    result = CliRunner().invoke(command, ["preview", str(output / "train")], color=True)
    assert "\x1b[32m" in result.stdout and "\x1b[2m" in result.stdout and ">>>" not in result.stdout
