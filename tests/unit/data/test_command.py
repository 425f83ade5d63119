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
