"""Datasets by name, configuration and split; folders stand for the hub, which tests do not ask."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from graphtrain.cli.data import command
from graphtrain.data.prepare.text import prepare
from sharding_rules.errors import UserError

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")


@pytest.fixture
def folder(tmp_path) -> Path:
    """A dataset of two configurations, as its card on the hub says."""
    path = tmp_path / "dataset"
    for name, words in {"small": "a short text", "large": "another text, of more words"}.items():
        (path / name).mkdir(parents=True)
        for split, count in {"train": 30, "test": 3}.items():
            rows = [{"text": f"{words} {i} é", "number": i} for i in range(count)]
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (path / name / f"{split}.jsonl").write_text(lines)
    (path / "README.md").write_text(
        "---\nconfigs:\n"
        + "".join(
            f"- config_name: {name}\n  data_files:\n"
            + "".join(f"  - {{split: {s}, path: {name}/{s}.jsonl}}\n" for s in ("train", "test"))
            for name in ("small", "large")
        )
        + "---\n"
    )
    return path


def hub(*words):
    result = CliRunner().invoke(command, ["hub", *map(str, words)])
    if result.exception is not None and not isinstance(result.exception, UserError):
        raise result.exception
    return str(result.exception or result.output)


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("streaming", [[], ["--streaming"]])
def test_a_split_of_a_configuration_is_written_and_prepared(folder, tmp_path, streaming):
    output = tmp_path / "rows.jsonl"
    out = hub(folder, output, "--config", "large", "--split", "test", *streaming)
    assert f"3 rows of {folder} large test" in out
    assert [row["number"] for row in read(output)] == [0, 1, 2]
    assert read(output)[2]["text"] == "another text, of more words 2 é"
    again = hub(folder, output, "--config", "large", "--split", "test", *streaming)
    assert "3 rows" in again  # the same file, so nothing is replaced
    made = prepare([output], tmp_path / "data", "bytes", validation=0)
    assert made.train.documents == 3


def test_columns_and_a_number_of_rows_are_chosen(folder, tmp_path):
    output = tmp_path / "rows.jsonl"
    hub(folder, output, "--config", "small", "--column", "text", "--rows", 7, "--streaming")
    assert len(read(output)) == 7 and read(output)[0] == {"text": "a short text 0 é"}
    assert "exists already with other content" in hub(folder, output, "--config", "large")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--config", "none"], "none train: ValueError: BuilderConfig 'none' not found"),
        (["--config", "small", "--split", "dev"], "small dev: ValueError: Unknown split"),
        (["--config", "small", "--column", "x"], "no column 'x', only text, number"),
        ([], "Config name is missing"),
    ],
)
def test_what_does_not_exist_is_named_and_nothing_is_written(folder, tmp_path, words, says):
    output = tmp_path / "rows.jsonl"
    assert says in hub(folder, output, *words)
    assert not output.exists() and not list(tmp_path.glob("rows*"))


def test_a_value_that_is_no_json_is_named(tmp_path):
    folder = tmp_path / "dataset"
    folder.mkdir()
    table = datasets.Dataset.from_dict({"text": ["a"], "raw": [b"\x00"]})
    table.to_parquet(folder / "train.parquet")
    assert "row 0: column 'raw' is bytes" in hub(folder, tmp_path / "rows.jsonl")
