"""Files and options that nobody writes on purpose: one paragraph says what is wrong with each."""

import os
import subprocess
import sys

import pytest

from graphtrain.config import load_config
from graphtrain.errors import ConfigError
from lowering.errors import LoweringError
from lowering.machine.target import Target
from sharding_rules.documents import DocumentError, parse_json, parse_toml, read_text
from sharding_rules.errors import ShardingError
from sharding_rules.paths import check_local_path
from sharding_rules.rules import Rules

CONFIG = """
[program.model]
layers = 2
embed = 64
heads = 4
mlp = 128
vocab = 256
[program.batch]
global_batch_size = 8
seq_len = 128
[run]
directory = "run"
steps = 3
data.train = "data"
"""
HOSTILE_TOML = {
    "nested tables": "a = " + "{a = " * 400 + "1" + "}" * 400,
    "nested arrays": "a = " + "[" * 100_000,
    "dotted key": "a." * 1500 + "b = 1",
    "many dotted keys": "".join("a." * 500 + f"k{i} = 1\n" for i in range(200)),
    "digits": "a = " + "9" * 5000,
    "size": "#" * 1_000_000,
    "NUL": "a = 1\0",
}


@pytest.mark.parametrize("name", HOSTILE_TOML)
def test_hostile_toml_is_refused_in_every_file(name, tmp_path):
    text = HOSTILE_TOML[name]
    with pytest.raises(DocumentError):
        parse_toml(text)
    path = tmp_path / "hostile.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"hostile.toml"):
        load_config(path)
    with pytest.raises(ShardingError, match=r"hostile.toml"):
        Rules.load([str(path)])
    (tmp_path / "a.toml").write_text(CONFIG)
    with pytest.raises(ConfigError, match=r"hostile.toml"):
        load_config(tmp_path / "a.toml", [f"program.model.preset={path}"])


def test_only_the_dots_of_one_key_are_limited():
    floats = ", ".join(f"0.{number}" for number in range(1, 501))
    document = parse_toml(f"a = [{floats}]\nb = '{'x.' * 500}' # {'.' * 500}\n")
    assert len(document["a"]) == 500
    strings = 'c = """' + "d.e" * 500 + '""""\nf = "' + "g." * 500 + '"'
    assert len(parse_toml(strings)) == 2


@pytest.mark.parametrize(
    "key",
    [
        "a." * 1500 + "b",
        "a . " * 101 + "b",
        '"a.\\"".' * 101 + "b",
        "'a'." * 101 + "b",
        "1." * 101 + "b",
    ],
)
@pytest.mark.parametrize("document", ["{} = 1", "[{}]", "x = {{ y = 1, {} = 1 }}", '"""a"""" {}'])
def test_a_long_dotted_key_is_refused_wherever_it_stands(key, document):
    with pytest.raises(DocumentError, match="line 2: a dotted key with more than 100 dots"):
        parse_toml("x = 'a.b' # c.d\n" + document.format(key))


@pytest.mark.parametrize("content", ["program = 5", "program.model = 5", "", "[[program.model]]"])
def test_a_preset_without_a_model_is_refused(content, tmp_path):
    (tmp_path / "preset.toml").write_text(content)
    (tmp_path / "a.toml").write_text(CONFIG)
    with pytest.raises(ConfigError, match=r"no table \[program.model\]"):
        load_config(tmp_path / "a.toml", [f"program.model.preset={tmp_path}/preset.toml"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("a." * 1500 + "b=1", "the name has 1501 parts"),
        ("program.x=" + "{a=" * 400 + "1" + "}" * 400, "inside each other"),
        ("run.steps=" + "9" * 5000, "should be a whole number"),
        ("program.model.layers=1000000", "at most 10000"),
        ("run.directory=gs://bucket/run", r"gs://bucket/run is a URL \(gs\)"),
        ("run.data.train=ftp://bucket/data", "no store that datasets can be streamed from"),
        ("run.data.validation=s3://", "names no dataset"),
        ("run.init_from=obs://bucket/run", r"\(obs\)"),
        ("run.init_adapter_from=https://host/x", r"\(https\)"),
        ("run.directory=" + "x" * 300, "is too long"),
        ("run.directory=" + "x/" * 3000, "is too long"),
        ('run.directory="a\\u0000b"', "contains NUL"),
        ('program.rules=["' + "x" * 300 + '.toml"]', "is too long"),
    ],
)
def test_a_hostile_override_is_refused_by_name(change, message, tmp_path):
    (tmp_path / "a.toml").write_text(CONFIG)
    with pytest.raises(ConfigError, match=message) as error:
        load_config(tmp_path / "a.toml", [change])
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("text", ["[" * 100_000, "[" * 200 + "]" * 200, "9" * 5000, "{", b"\xff"])
def test_hostile_json_is_refused(text):
    with pytest.raises(DocumentError):
        parse_json(text)


def test_what_is_no_file_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    assert read_text(tmp_path / "fifo") == ""
    with pytest.raises(DocumentError, match="not a regular file"):
        read_text("/dev/zero")
    with pytest.raises(DocumentError, match="no file can have this name"):
        read_text("a\0b")
    with pytest.raises(IsADirectoryError):
        read_text(tmp_path)
    (tmp_path / "large").write_text("x" * 100)
    with pytest.raises(DocumentError, match="longer than 99 bytes"):
        read_text(tmp_path / "large", 99)


@pytest.mark.parametrize("path", ["run", "/a/b", "C:/x", "a:b", "a" * 255, "ü" * 127])
def test_a_local_path_is_accepted(path):
    assert check_local_path(path) == path


@pytest.mark.parametrize(
    "name", ["cpu:" + "9" * 5000, "h" * 5000, "cpu:1x1x1x1", "cpu:²", "cpu:-1"]
)
def test_a_hostile_target_is_refused_in_a_line(name):
    with pytest.raises(LoweringError) as error:
        Target.parse(name)
    assert len(str(error.value)) < 1000


def command(*words, **options):
    process = [sys.executable, "-m", "graphtrain", *words]
    return subprocess.run(process, capture_output=True, text=True, timeout=60, **options)


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "a\x1b[2Jb.toml"],
        ["plan", "a.toml", "--set", "run.x\x1b]0;title\x07=1"],
        ["plan", "a.toml", "--no\x1b[2Jsuch"],
        ["no\x1b[2Jsuch"],
    ],
)
def test_a_message_contains_no_escape_sequence(words, tmp_path):
    (tmp_path / "a.toml").write_text(CONFIG)
    result = command(*words, cwd=tmp_path)
    assert result.returncode == 2
    assert "\x1b" not in result.stderr + result.stdout and "\x07" not in result.stderr
    assert "x1b" in result.stderr or "u001b" in result.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "gs://bucket/a.toml"],
        ["convert", "hf-to-graphtrain", "hf://owner/model", "out"],
        ["convert", "hf-to-graphtrain", "in", "s3://bucket/out"],
        ["data", "prepare", "oss://bucket/a.jsonl", "--tokenizer", "bytes", "--output", "out"],
        ["plan", "a.toml", "--no-compile", "--html", "http://host/x.html"],
    ],
)
def test_an_object_store_is_refused_where_a_file_is_meant(words, tmp_path):
    (tmp_path / "a.toml").write_text(CONFIG)
    result = command(*words, cwd=tmp_path)
    assert result.returncode == 2
    assert "is a URL" in result.stderr and "a local path is needed" in result.stderr
    assert os.listdir(tmp_path) == ["a.toml"]


def test_a_name_that_is_too_long_is_an_error_of_the_user(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    words = ["data", "prepare", "a.jsonl", "--output", "out", "--tokenizer"]
    result = command(*words, "x" * 300 + ".json", cwd=tmp_path)
    assert result.returncode == 2 and "File name too long" in result.stderr
