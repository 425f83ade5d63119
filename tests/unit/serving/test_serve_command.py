"""Options of `graphtrain serve`."""

import pytest
from click.testing import CliRunner

from graphtrain.api import serving
from graphtrain.cli import serve


@pytest.fixture
def invoke(monkeypatch, tmp_path):
    """A function that runs the command; returns its result, and the arguments of the server."""
    monkeypatch.setattr(serve, "check", lambda config, *_: config)
    for variable in ("GRAPHTRAIN_API_KEY", "GRAPHTRAIN_CACHE"):
        monkeypatch.delenv(variable, raising=False)

    def invoke(*words):
        calls = []
        monkeypatch.setattr(serving, "serve", lambda config, **options: calls.append(options))
        result = CliRunner().invoke(serve.command, [str(tmp_path / "a.toml"), *words])
        return result, calls[0] if calls else {}

    return invoke


def test_the_server_listens_on_this_machine_only_and_needs_no_key(invoke):
    result, options = invoke()
    assert result.exit_code == 0
    assert (options["host"], options["port"], options["api_key"]) == ("127.0.0.1", 8000, None)
    assert options["max_body"] == 8_000_000
    assert options["compile_hint"].endswith("a.toml --for serve")


def test_the_key_is_that_of_the_file_or_of_the_environment(invoke, monkeypatch, tmp_path):
    monkeypatch.setenv("GRAPHTRAIN_API_KEY", "of the environment")
    assert invoke()[1]["api_key"] == "of the environment"
    (tmp_path / "key").write_text("of-the-file\n")
    assert invoke("--api-key-file", str(tmp_path / "key"))[1]["api_key"] == "of-the-file"


def test_adapters_are_folders_by_name(invoke, tmp_path):
    (tmp_path / "b=c").mkdir()
    words = ["--adapter", f"a={tmp_path}", "--adapter", f"b={tmp_path}/b=c"]
    assert invoke(*words)[1]["adapters"] == {"a": tmp_path, "b": tmp_path / "b=c"}
    assert invoke()[1]["adapters"] == {}


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["a"], "write NAME=FOLDER"),
        (["=."], "write NAME=FOLDER"),
        (["a=nowhere"], "does not exist"),
        (["a=.", "a=.."], "'a' is named twice"),
    ],
)
def test_an_adapter_without_a_name_or_a_folder_is_refused(invoke, words, error):
    result, options = invoke(*(word for one in words for word in ("--adapter", one)))
    assert result.exit_code == 2 and not options
    assert error in result.output


@pytest.mark.parametrize("key", ["", "\n", "two\nlines", "ключ"])
def test_a_key_that_no_client_can_send_is_refused(invoke, tmp_path, key):
    (tmp_path / "key").write_text(key)
    result, options = invoke("--api-key-file", str(tmp_path / "key"))
    assert result.exit_code == 2 and not options
    assert "an API key is one line of ASCII characters" in result.output
